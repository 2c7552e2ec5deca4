// Blockwise quantization on a GPU, bit for bit as reference.py defines it. Compiled at run time by NVRTC (cuda.py), by
// nvcc as a check, and by g++ with a shim in the tests; so it includes only peerd's own headers.
//
// 256 threads process a tile of 4096 values at a time, 16 values each: a whole number of blocks of any size. Each value
// is read once and kept in a register: largest magnitude, scale, code. A warp owns 512 adjacent values, in rows, and
// each lane 16 bytes of a row. Blocks of up to 512 values stay inside a warp; larger ones combine their maxima in
// shared memory. A tile that reaches beyond the end, or unaligned memory, is read and written value by value.
// The grid has as many CUDA blocks as fit at once; they iterate over the tiles, and set up their tables only once.

#ifndef PEERD_SHIM  // the tests define their own
#define PEERD_TABLE __device__ const
#define PEERD_WIDE(type, pointer) (*(type*)(pointer))
#endif
#ifdef __CUDACC__
#pragma nv_diag_suppress 177  // some tables of the header are unused here
#endif
#include "tables.h"
#include "blockwise_gpu.h"

// --- tables in shared memory ----------------------------------------------------------------------------------------

// Shared memory of a CUDA block: its warps' largest magnitudes (two sets, used alternately), and the code's table.
template <Code C> struct Shared {
    u32 largest[2][WARPS];
    __device__ void prepare() {}
};

// Encoding dynamic8: the upper bits of a magnitude select an entry, and magnitude + entry has the code in bits 17 to
// 23. The entry replaces the upper bits by the code, and makes the lower bits carry into it at the threshold.
template <> struct Shared<DYNAMIC8> {
    u32 largest[2][WARPS];
    u32 carry[PEERD_DYNAMIC_LUT_COUNT];
    __device__ void prepare() {
        const u32 shift = PEERD_DYNAMIC_LUT_SHIFT;
        for (u32 i = threadIdx.x; i < PEERD_DYNAMIC_LUT_COUNT; i += THREADS) {
            const u32 entry = PEERD_DYNAMIC_LUT[i];
            carry[i] = ((entry & 0xFFu) << shift) + (1u << shift) - (entry >> 8) -
                       ((PEERD_DYNAMIC_LUT_FIRST + i) << shift);
        }
    }
};

// The nf4 bucket of a value in [-1, 1], monotonic in the value: 0 to 32, each 1/16 wide. Thresholds are further apart,
// so a bucket contains at most one. NaN gives some bucket below 64.
__device__ __forceinline__ u32 nf4_bucket(float n) {
    return __float_as_uint(__fmaf_rn(n, 16.0f, 12582928.0f)) % NF4_BUCKETS;  // 1.5 * 2^23 + 16: the integer below
}

template <> struct Shared<NF4> {
    u32 largest[2][WARPS];
    uint2 step[NF4_BUCKETS];  // the threshold (bits) in the bucket, and the code below it
    __device__ void prepare() {
        const u32 bucket = threadIdx.x;
        if (bucket >= NF4_BUCKETS) return;
        uint2 found = make_uint2(0x7F800000u, 0);
        for (int j = 0; j < 15; j++) {
            const u32 bits = PEERD_NF4_THRESHOLD_BITS[j];
            const u32 its = nf4_bucket(__uint_as_float(bits));
            if (its < bucket) found.y++;
            if (its == bucket) found.x = bits;
        }
        step[bucket] = found;
    }
};

// Decoding tables, from code to value. The other codes are decoded by arithmetic.
template <Code C> struct Values {
    __device__ void prepare() {}
};
template <> struct Values<DYNAMIC8> {
    float of[256];
    __device__ void prepare() {
        of[threadIdx.x] = __uint_as_float(PEERD_DYNAMIC_BITS[threadIdx.x % 128] | (threadIdx.x / 128) << 31);
    }
};
template <> struct Values<NF4> {
    float of[16];
    __device__ void prepare() {
        if (threadIdx.x < 16) of[threadIdx.x] = __uint_as_float(PEERD_NF4_BITS[threadIdx.x]);
    }
};

// --- encoding -------------------------------------------------------------------------------------------------------

// One byte of each of four words.
template <int BYTE> __device__ __forceinline__ u32 gather(const u32* word) {
    const u32 pick = BYTE | (BYTE + 4) << 4;
    return __byte_perm(__byte_perm(word[0], word[1], pick), __byte_perm(word[2], word[3], pick), 0x5410);
}

__device__ __forceinline__ u32 dynamic_sum(float n, const Shared<DYNAMIC8>& shared) {
    const float first = __uint_as_float(PEERD_DYNAMIC_LUT_FIRST << PEERD_DYNAMIC_LUT_SHIFT);
    const u32 magnitude = __float_as_uint(fmaxf(fabsf(n), first));  // NaN, in a block without codes, becomes `first`
    return magnitude + shared.carry[(magnitude >> PEERD_DYNAMIC_LUT_SHIFT) - PEERD_DYNAMIC_LUT_FIRST];
}

// In the low byte: `n * 448` as e4m3 without its sign. Adding 2^20 of its own binade (or of the smallest normal one)
// rounds to three bits of fraction; the upper bits of the sum are the exponent.
__device__ __forceinline__ u32 e4m3(float n) {
    const float scaled = __fmul_rn(n, 448.0f);
    const u32 binade = max(__float_as_uint(scaled) & 0x7F800000u, 0x3C800000u) + (20u << 23);
    const float sum = __fadd_rn(fabsf(scaled), __uint_as_float(binade));
    return __float_as_uint(sum) + (binade >> 20) - (141u << 3);
}

__device__ __forceinline__ u32 nf4(float n, const Shared<NF4>& shared) {
    const uint2 step = shared.step[nf4_bucket(n)];
    return step.y + (n >= __uint_as_float(step.x) ? 1u : 0u);
}

// Codes of four values (bytes) or one (4 bits). `n`: values times the inverse scale; `signs`: from signs_of.
template <Code C> struct Encoder;

template <> struct Encoder<DYNAMIC8> {
    static const u32 ZERO = 0;
    static __device__ __forceinline__ u32 four(const float* n, u32 signs, const Shared<DYNAMIC8>& shared) {
        u32 sum[4];
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] = dynamic_sum(n[j], shared);
        return (gather<2>(sum) >> 1 & 0x7F7F7F7Fu) | (signs & 0x80808080u);
    }
};

template <> struct Encoder<INT8> {
    static const u32 ZERO = 0;
    static __device__ __forceinline__ u32 four(const float* n, u32, const Shared<INT8>&) {
        u32 sum[4];  // adding 1.5 * 2^23 rounds to an integer, half to even, in the lower bits
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] = __float_as_uint(__fadd_rn(__fmul_rn(n[j], 127.0f), 12582912.0f));
        return gather<0>(sum);
    }
};

template <> struct Encoder<E4M3> {
    static const u32 ZERO = 0;
    static __device__ __forceinline__ u32 four(const float* n, u32 signs, const Shared<E4M3>&) {
        u32 code[4];
#pragma unroll
        for (int j = 0; j < 4; j++) code[j] = e4m3(n[j]);
        return (gather<0>(code) & 0x7F7F7F7Fu) | (signs & 0x80808080u);
    }
};

template <> struct Encoder<INT4> {
    static const u32 ZERO = 0x88888888u;
    static __device__ __forceinline__ u32 one(float n, const Shared<INT4>&) {
        return __float_as_uint(__fadd_rn(__fmul_rn(n, 7.0f), 12582920.0f)) - 0x4B400000u;  // plus 8, see INT8
    }
};

template <> struct Encoder<NF4> {
    static const u32 ZERO = 0x77777777u;
    static __device__ __forceinline__ u32 one(float n, const Shared<NF4>& shared) { return nf4(n, shared); }
};

template <Dtype D, Code C, int BITS> struct Packed {
    static __device__ __forceinline__ void make(u32* code, const u32* word, float inverse, const Shared<C>& shared) {
#pragma unroll
        for (int first = 0; first < Row<D>::WIDTH; first += 4) {
            float n[4];
#pragma unroll
            for (int j = 0; j < 4; j++) n[j] = __fmul_rn(value_of<D>(word, first + j), inverse);
            code[first / 4] = Encoder<C>::four(n, signs_of<D>(word, first), shared);
        }
    }
};
template <Dtype D, Code C> struct Packed<D, C, 4> {
    static __device__ __forceinline__ void make(u32* code, const u32* word, float inverse, const Shared<C>& shared) {
        u32 all = 0;
#pragma unroll
        for (int j = Row<D>::WIDTH - 1; j >= 0; j--) {
            all = (all << 4) + Encoder<C>::one(__fmul_rn(value_of<D>(word, j), inverse), shared);
        }
        code[0] = all;
    }
};

// --- scales ---------------------------------------------------------------------------------------------------------

// Scale (bits) of the block that a row of this thread belongs to, and its inverse (0 if the block is not encoded).
struct Scale {
    u32 bits;
    float inverse;
};

__device__ __forceinline__ bool usable(u32 bits) { return bits - 1 < PEERD_LARGEST_BITS; }

__device__ __forceinline__ Scale scale_of(u32 largest) {
    Scale scale;
    scale.bits = largest > PEERD_SMALLEST_BITS ? largest : 0;
    scale.inverse = usable(scale.bits) ? __frcp_rn(__uint_as_float(scale.bits)) : 0.0f;
    return scale;
}

// For each row, the maximum over 8, 16 or 32 adjacent lanes.
template <int ROWS> __device__ __forceinline__ void over_lanes(u32* largest, int lanes) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        if (distance >= 8 && distance >= lanes) continue;
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            largest[row] = max(largest[row], __shfl_xor_sync(0xFFFFFFFFu, largest[row], distance));
        }
    }
}

// The maximum over the warps that share a block. `turn` alternates between tiles, so that one barrier is enough.
__device__ __forceinline__ u32 over_warps(u32 largest, u32 (*shared)[WARPS], int block_log2, int turn) {
    const int warp = threadIdx.x / LANES, together = 1 << (block_log2 - WARP_LOG2);
    if (threadIdx.x % LANES == 0) shared[turn][warp] = largest;
    __syncthreads();
    const int first = warp & ~(together - 1);
    for (int other = 0; other < together; other++) largest = max(largest, shared[turn][first + other]);
    return largest;
}

// The branches depend on the block size alone, so all threads of the grid take the same one.
template <Dtype D>
__device__ __forceinline__ void find_scales(Scale* scale, u32 (*word)[4], u32 (*shared)[WARPS], int block_log2, int turn) {
    const int width = Row<D>::WIDTH, rows = Row<D>::COUNT;
    u32 largest[rows];
#pragma unroll
    for (int row = 0; row < rows; row++) largest[row] = largest_of<D>(word[row]);
    if (block_log2 >= WARP_LOG2) {
#pragma unroll
        for (int row = 1; row < rows; row++) largest[0] = max(largest[0], largest[row]);
        over_lanes<1>(largest, LANES);
        if (block_log2 > WARP_LOG2) largest[0] = over_warps(largest[0], shared, block_log2, turn);
        scale[0] = scale_of(largest[0]);
#pragma unroll
        for (int row = 1; row < rows; row++) scale[row] = scale[0];
    } else if (block_log2 > Row<D>::LOG2) {  // two rows
#pragma unroll
        for (int pair = 0; pair < rows / 2; pair++) largest[pair] = max(largest[2 * pair], largest[2 * pair + 1]);
        over_lanes<rows / 2>(largest, LANES);
#pragma unroll
        for (int pair = 0; pair < rows / 2; pair++) scale[2 * pair] = scale[2 * pair + 1] = scale_of(largest[pair]);
    } else {
        over_lanes<rows>(largest, (1 << block_log2) / width);
#pragma unroll
        for (int row = 0; row < rows; row++) scale[row] = scale_of(largest[row]);
    }
}

// --- kernels --------------------------------------------------------------------------------------------------------

template <Dtype D, Code C, bool WHOLE> struct Coder {
    static __device__ __forceinline__ void store(const u32* word, const Scale& scale, const Shared<C>& shared,
                                                 const Job& job, i64 at) {
        u32 code[2] = {0, 0};
        Packed<D, C, Bits<C>::COUNT>::make(code, word, scale.inverse, shared);
        if (!usable(scale.bits)) code[0] = code[1] = Encoder<C>::ZERO;
        store_codes<D, C, WHOLE>(code, job, at);
    }
};
template <Dtype D, bool WHOLE> struct Coder<D, NONE, WHOLE> {
    static __device__ __forceinline__ void store(const u32*, const Scale&, const Shared<NONE>&, const Job&, i64) {}
};

template <Dtype D, Code C, bool WHOLE>
__device__ __forceinline__ void quantize_tile(const Job& job, Shared<C>& shared, i64 tile, int turn) {
    const int rows = Row<D>::COUNT;
    u32 word[rows][4];
    Scale scale[rows];
#pragma unroll
    for (int row = 0; row < rows; row++) load<D, WHOLE>(word[row], job, tile + place<D>(row));
    find_scales<D>(scale, word, shared.largest, job.block_log2, turn);
    float* scales = job.scales + (tile >> job.block_log2);
#pragma unroll
    for (int row = 0; row < rows; row++) {
        const u32 inside = place<D>(row);
        if ((inside & ((1u << job.block_log2) - 1)) == 0 && (WHOLE || tile + inside < job.count)) {
            scales[inside >> job.block_log2] = __uint_as_float(scale[row].bits);
        }
        Coder<D, C, WHOLE>::store(word[row], scale[row], shared, job, tile + inside);
    }
}

template <Dtype D, Code C> __device__ __forceinline__ void quantize(const Job& job, Shared<C>& shared) {
    const bool even = aligned<D, C>(job);
    shared.prepare();
    __syncthreads();
    int turn = 0;
    for (i64 tile = (i64)blockIdx.x * TILE; tile < job.count; tile += (i64)gridDim.x * TILE) {
        if (even && job.count - tile >= TILE) quantize_tile<D, C, true>(job, shared, tile, turn);
        else quantize_tile<D, C, false>(job, shared, tile, turn);
        turn ^= 1;
    }
}

// Value of a code without its scale, and the conversion of the scale into the factor for the values.
template <Code C> struct Decoder;

template <> struct Decoder<DYNAMIC8> {
    static __device__ __forceinline__ float scale(float scale) { return scale; }
    static __device__ __forceinline__ float one(u32 byte, const Values<DYNAMIC8>& values) { return values.of[byte]; }
};
template <> struct Decoder<INT8> {
    static __device__ __forceinline__ float scale(float scale) {
        return __fmul_rn(scale, __uint_as_float(PEERD_INV127_BITS));
    }
    static __device__ __forceinline__ float one(u32 byte, const Values<INT8>&) {
        return fmaxf(__fadd_rn(__uint_as_float(byte ^ 0x4B000080u), -8388736.0f), -127.0f);  // 2^23 + 128 + q
    }
};
template <> struct Decoder<INT4> {
    static __device__ __forceinline__ float scale(float scale) {
        return __fmul_rn(scale, __uint_as_float(PEERD_INV7_BITS));
    }
    static __device__ __forceinline__ float one(u32 nibble, const Values<INT4>&) {
        return fmaxf(__fadd_rn(__uint_as_float(nibble | 0x4B000000u), -8388616.0f), -7.0f);  // 2^23 + 8 + q
    }
};
template <> struct Decoder<NF4> {
    static __device__ __forceinline__ float scale(float scale) { return scale; }
    static __device__ __forceinline__ float one(u32 nibble, const Values<NF4>& values) { return values.of[nibble]; }
};
template <> struct Decoder<E4M3> {
    static __device__ __forceinline__ float scale(float scale) {
        return __fmul_rn(scale, __uint_as_float(PEERD_INV448_BITS));
    }
    static __device__ __forceinline__ float one(u32 byte, const Values<E4M3>&) {
        const u32 magnitude = min(byte & 0x7Fu, 0x7Eu);  // NaN decodes to the largest value
        return __fmul_rn(__uint_as_float((byte & 0x80u) << 24 | magnitude << 20), __uint_as_float(0x7B800000u));  // 2^120
    }
};

template <Dtype D, Code C, bool WHOLE>
__device__ __forceinline__ void dequantize_tile(const Job& job, const Values<C>& values, i64 tile) {
    const int width = Row<D>::WIDTH, rows = Row<D>::COUNT, bits = Bits<C>::COUNT;
    const float* scales = job.scales + (tile >> job.block_log2);
    u32 word[rows][2];
    float scale[rows];
#pragma unroll
    for (int row = 0; row < rows; row++) {
        const u32 inside = place<D>(row);
        load_codes<D, C, WHOLE>(word[row], job, tile + inside);
        scale[row] = WHOLE || tile + inside < job.count ? scales[inside >> job.block_log2] : 0.0f;
    }
#pragma unroll
    for (int row = 0; row < rows; row++) {
        const float factor = Decoder<C>::scale(scale[row]);
        float x[width];
#pragma unroll
        for (int j = 0; j < width; j++) {
            const u32 code = word[row][j * bits / 32] >> (j * bits % 32) & ((1u << bits) - 1);
            x[j] = __fmul_rn(Decoder<C>::one(code, values), factor);
        }
        store<D, WHOLE>(x, job, tile + place<D>(row));
    }
}

template <Dtype D, Code C> __device__ __forceinline__ void dequantize(const Job& job, Values<C>& values) {
    const bool even = aligned<D, C>(job);
    values.prepare();
    __syncthreads();
    for (i64 tile = (i64)blockIdx.x * TILE; tile < job.count; tile += (i64)gridDim.x * TILE) {
        if (even && job.count - tile >= TILE) dequantize_tile<D, C, true>(job, values, tile);
        else dequantize_tile<D, C, false>(job, values, tile);
    }
}

#define PEERD_KERNELS(CODE, code, DTYPE, dtype)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) peerd_quantize_##code##_##dtype(const Job job) {       \
        __shared__ Shared<CODE> shared;                                                                          \
        quantize<DTYPE, CODE>(job, shared);                                                                      \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) peerd_dequantize_##code##_##dtype(const Job job) {     \
        __shared__ Values<CODE> values;                                                                          \
        dequantize<DTYPE, CODE>(job, values);                                                                    \
    }
#define PEERD_SCALES(DTYPE, dtype)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) peerd_scales_##dtype(const Job job) {                  \
        __shared__ Shared<NONE> shared;                                                                          \
        quantize<DTYPE, NONE>(job, shared);                                                                      \
    }
#define PEERD_DTYPES(CODE, code)          \
    PEERD_KERNELS(CODE, code, F32, f32)   \
    PEERD_KERNELS(CODE, code, BF16, bf16) \
    PEERD_KERNELS(CODE, code, F16, f16)

// PEERD_ONLY: the number of the one code to compile (as on the wire), or 0 for the scales; undefined: all.
#if !defined(PEERD_ONLY) || PEERD_ONLY == 16
PEERD_DTYPES(DYNAMIC8, dynamic8)
#endif
#if !defined(PEERD_ONLY) || PEERD_ONLY == 17
PEERD_DTYPES(INT8, int8)
#endif
#if !defined(PEERD_ONLY) || PEERD_ONLY == 18
PEERD_DTYPES(INT4, int4)
#endif
#if !defined(PEERD_ONLY) || PEERD_ONLY == 19
PEERD_DTYPES(NF4, nf4)
#endif
#if !defined(PEERD_ONLY) || PEERD_ONLY == 20
PEERD_DTYPES(E4M3, e4m3)
#endif
#if !defined(PEERD_ONLY) || PEERD_ONLY == 0
PEERD_SCALES(F32, f32)
PEERD_SCALES(BF16, bf16)
PEERD_SCALES(F16, f16)
#endif
