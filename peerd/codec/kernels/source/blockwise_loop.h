/* The loop over blocks, included once per instruction set, inside its namespace and after these primitives:

GROUP                               values processed at a time; a multiple of 2 that divides 64
Values                              GROUP singles in registers
load<dtype>(from)                   converts to single exactly; no alignment needed
store<dtype>(values, to, stream)    rounds to nearest even
Bits, no_bits(), larger(bits, values), largest(bits)
                                    running maximum of the magnitudes' bits
encode<code>(values, inverse, to, stream)
decode<code>(from, multiplier) -> Values

PEERD_FN and PEERD_LOOP are the qualifiers of an inlined function and of a whole loop. A run of blocks is read twice,
the second time from the L1 cache. The rest of the last block after whole groups is processed as a padded copy. */

template <int dtype>
PEERD_FN Values load_padded(const char* from, int64_t count) {
    alignas(64) char padded[GROUP * value_bytes(dtype)] = {};
    memcpy(padded, from, static_cast<size_t>(count * value_bytes(dtype)));
    return load<dtype>(padded);
}

/* Bits of the largest magnitude of `count` values; 0 if it is at most PEERD_SMALLEST_BITS. */
template <int dtype>
PEERD_FN uint32_t scale_bits(const char* x, int64_t count) {
    Bits most = no_bits();
    int64_t i = 0;
    for (; i + GROUP <= count; i += GROUP) most = larger(most, load<dtype>(x + i * value_bytes(dtype)));
    if (i < count) most = larger(most, load_padded<dtype>(x + i * value_bytes(dtype), count - i));
    const uint32_t bits = largest(most);
    return bits <= PEERD_SMALLEST_BITS ? 0 : bits;
}

template <int dtype>
PEERD_LOOP void scales_alone(const char* x, int64_t n, int64_t block, char* scales) {
    for (int64_t start = 0; start < n; start += block, scales += 4) {
        const uint32_t bits = scale_bits<dtype>(x + start * value_bytes(dtype), n - start < block ? n - start : block);
        memcpy(scales, &bits, 4);
    }
}

/* Codes of a run of blocks; those made with an inverse scale of 0 are invalid. The loops call no function, so that the
tables stay in registers. */
template <int dtype, int code>
PEERD_FN void encode_run(const char* x, int64_t count, int64_t block, const float* inverses, uint8_t* codes,
                         bool stream) {
    const int64_t rest = count % GROUP, whole = count - rest;
    for (int64_t start = 0, b = 0; start < whole; start += block, ++b) {
        const int64_t end = whole - start < block ? whole : start + block;
        for (int64_t i = start; i < end; i += GROUP)
            encode<code>(load<dtype>(x + i * value_bytes(dtype)), inverses[b], codes + code_bytes(code, i), stream);
    }
    if (rest != 0) {
        alignas(64) uint8_t padded[GROUP];
        encode<code>(load_padded<dtype>(x + whole * value_bytes(dtype), rest), inverses[whole / block], padded, false);
        memcpy(codes + code_bytes(code, whole), padded, static_cast<size_t>(code_bytes(code, rest)));
    }
}

/* Uses separate passes over each run of blocks, so that the processor does not wait for each block's scale. */
template <int dtype, int code>
PEERD_LOOP void quantize(const char* x, int64_t n, int64_t block, char* scales, uint8_t* codes, bool stream) {
    const int64_t length = block < RUN ? RUN : block;
    for (int64_t run = 0; run < n; run += length) {
        const int64_t count = n - run < length ? n - run : length;
        const char* from = x + run * value_bytes(dtype);
        uint8_t* to = codes + code_bytes(code, run);
        float inverses[RUN / 64];
        bool all_coded = true;
        scales_alone<dtype>(from, count, block, scales);
        for (int64_t start = 0, b = 0; start < count; start += block, ++b, scales += 4) {
            uint32_t bits;
            memcpy(&bits, scales, 4);
            const bool coded = bits != 0 && bits <= PEERD_LARGEST_BITS;
            inverses[b] = coded ? 1.0f / float_of(bits) : 0.0f;
            all_coded &= coded;
        }
        encode_run<dtype, code>(from, count, block, inverses, to, stream);
        for (int64_t start = 0, b = 0; !all_coded && start < count; start += block, ++b) {
            const int64_t values = count - start < block ? count - start : block;
            if (inverses[b] == 0.0f)
                memset(to + code_bytes(code, start), zero_byte(code), static_cast<size_t>(code_bytes(code, values)));
        }
        if (two_a_byte(code) && count % 2) to[count / 2] &= 0x0F;  // nothing follows the last value
    }
}

template <int dtype, int code>
PEERD_LOOP void dequantize(const uint8_t* codes, const char* scales, int64_t n, int64_t block, char* out, bool stream) {
    for (int64_t start = 0; start < n; start += block, scales += 4) {
        const int64_t count = n - start < block ? n - start : block;
        const uint8_t* from = codes + code_bytes(code, start);
        char* to = out + start * value_bytes(dtype);
        uint32_t bits;
        memcpy(&bits, scales, 4);
        const float by = multiplier(code, float_of(bits));
        int64_t i = 0;
        for (; i + GROUP <= count; i += GROUP)
            store<dtype>(decode<code>(from + code_bytes(code, i), by), to + i * value_bytes(dtype), stream);
        if (i < count) {
            alignas(64) uint8_t padded[GROUP] = {};
            alignas(64) char values[GROUP * value_bytes(dtype)];
            memcpy(padded, from + code_bytes(code, i), static_cast<size_t>(code_bytes(code, count - i)));
            store<dtype>(decode<code>(padded, by), values, false);
            memcpy(to + i * value_bytes(dtype), values, static_cast<size_t>((count - i) * value_bytes(dtype)));
        }
    }
}

#define PEERD_EACH_CODE(f, dtype) \
    { f<dtype, DYNAMIC8>, f<dtype, INT8>, f<dtype, INT4>, f<dtype, NF4>, f<dtype, E4M3> }
static const Kernels KERNELS = {
    {PEERD_EACH_CODE(quantize, FLOAT32), PEERD_EACH_CODE(quantize, BFLOAT16), PEERD_EACH_CODE(quantize, FLOAT16)},
    {PEERD_EACH_CODE(dequantize, FLOAT32), PEERD_EACH_CODE(dequantize, BFLOAT16), PEERD_EACH_CODE(dequantize, FLOAT16)},
    {scales_alone<FLOAT32>, scales_alone<BFLOAT16>, scales_alone<FLOAT16>},
};
#undef PEERD_EACH_CODE
