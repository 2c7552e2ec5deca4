/* Tables split into planes of bytes, at compile time from tables.h, for processors that look up many bytes at once.

A single is looked up as four bytes; plane k has byte k of each entry. */
#ifndef PEERD_BLOCKWISE_PLANES_H
#define PEERD_BLOCKWISE_PLANES_H

#include "blockwise_common.h"

namespace peerd {

template <int entries>
struct Planes {
    alignas(64) uint8_t byte[4][entries];

    constexpr void set(int i, uint32_t bits) {
        for (int k = 0; k < 4; ++k) byte[k][i] = static_cast<uint8_t>(bits >> 8 * k);
    }
};

constexpr Planes<128> dynamic_planes() {
    Planes<128> planes{};
    for (int i = 0; i < 128; ++i) planes.set(i, PEERD_DYNAMIC_BITS[i]);
    return planes;
}

/* Entry m: the threshold above magnitude m. */
constexpr Planes<128> dynamic_threshold_planes() {
    Planes<128> planes{};
    for (int i = 0; i < 127; ++i) planes.set(i, PEERD_DYNAMIC_THRESHOLD_BITS[i]);
    planes.set(127, 0x7F800000u);
    return planes;
}

/* Bits of a non-negative fraction whose denominator is a power of two. */
constexpr uint32_t single_bits(uint32_t numerator, int denominator_log2) {
    if (numerator == 0) return 0;
    int width = 0;
    while (numerator >> width > 1) ++width;
    const int exponent = 127 - denominator_log2 + width;
    return static_cast<uint32_t>(exponent) << 23 | (numerator << (23 - width) & 0x7FFFFFu);
}

constexpr Planes<128> e4m3_planes() {
    Planes<128> planes{};
    for (int i = 0; i < 128; ++i) {
        const int code = i == 127 ? 126 : i;
        const int exponent = code >> 3, mantissa = code & 7;
        planes.set(i, exponent == 0 ? single_bits(static_cast<uint32_t>(mantissa), 9)
                                    : single_bits(static_cast<uint32_t>(8 + mantissa), 10 - exponent));
    }
    return planes;
}

/* Maps the upper 16 bits of a magnitude to a bucket with at most one threshold. There are as few buckets as possible,
so that a byte can number them: (upper >> shift[e]) + base[e] modulo 2^16, where e is the exponent's lower bits. */
struct DynamicBuckets {
    static constexpr int FIRST_EXPONENT = (PEERD_DYNAMIC_THRESHOLD_BITS[0] >> 23) - 1;
    alignas(64) uint16_t shift[32];
    alignas(64) uint16_t base[32];
    alignas(64) uint8_t below[256];  // thresholds below the bucket
    int count;
};

constexpr bool is_fine_enough(int exponent, int shift) {
    uint32_t before = 0;
    for (int j = 0; j < 127; ++j) {
        const uint32_t upper = PEERD_DYNAMIC_THRESHOLD_BITS[j] >> 16;
        if (static_cast<int>(upper >> 7) != exponent) continue;
        if (before == (upper >> shift) + 1) return false;
        before = (upper >> shift) + 1;
    }
    return true;
}

constexpr DynamicBuckets dynamic_buckets() {
    DynamicBuckets buckets{};
    for (int exponent = DynamicBuckets::FIRST_EXPONENT; exponent <= 127; ++exponent) {
        int shift = 7;
        while (!is_fine_enough(exponent, shift)) --shift;
        const int first = exponent << 7 >> shift, here = 1 << (7 - shift);
        buckets.shift[exponent % 32] = static_cast<uint16_t>(shift);
        buckets.base[exponent % 32] = static_cast<uint16_t>(buckets.count - first);
        for (int i = 0; i < here; ++i) {
            int below = 0;
            for (int j = 0; j < 127; ++j)
                below += static_cast<int>(PEERD_DYNAMIC_THRESHOLD_BITS[j] >> 16 >> shift) < first + i;
            buckets.below[(buckets.count + i) % 256] = static_cast<uint8_t>(below);
        }
        buckets.count += here;
    }
    return buckets;
}

/* Bucket of a value n in [-1, 1]: 16 + n * STEPS rounded, in the lower bits of n * STEPS + MIDDLE. With any rounding,
the bucket is monotonic in n, so a threshold in a lower bucket than n's is not above n. */
struct Nf4Buckets {
    static constexpr float STEPS = 15.25f, MIDDLE = 12582912.0f + 16.0f;
    alignas(64) unsigned int below[32];  // thresholds in lower buckets
    alignas(64) unsigned int next[32];   // the next threshold
};

constexpr double nf4_threshold(int j) {
    const uint32_t bits = PEERD_NF4_THRESHOLD_BITS[j];
    double value = 1.0 + static_cast<double>(bits & 0x7FFFFFu) / 8388608.0;
    for (uint32_t exponent = bits >> 23 & 0xFFu; exponent < 127; ++exponent) value /= 2;
    return bits >> 31 ? -value : value;
}

constexpr Nf4Buckets nf4_buckets() {
    Nf4Buckets buckets{};
    for (int i = 0; i < 32; ++i) {
        unsigned int below = 0;
        while (below < 15 && nf4_threshold(static_cast<int>(below)) * Nf4Buckets::STEPS < i - 16.5) ++below;
        buckets.below[i] = below;
        buckets.next[i] = below < 15 ? PEERD_NF4_THRESHOLD_BITS[below] : 0x7F800000u;
    }
    return buckets;
}

}  // namespace peerd

#endif
