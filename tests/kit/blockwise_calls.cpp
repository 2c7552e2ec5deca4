/* Carries out calls of the quantization library that a file lists, and writes what came back to another.

Built together with blockwise.cpp for another processor, or with checks that a library loaded into Python cannot have.
A call is six whole numbers of 8 bytes (function, instruction set, dtype, code, block_log2, n), the sizes of three inputs
and four outputs, and the inputs; its answer is the status and the outputs. Outputs are longer than said by a margin
whose content has to survive. Inputs and outputs are placed off an aligned address: by one byte, or by four where the
function wants that. */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
int peerd_quantize(const void* x, int dtype, int64_t n, int code, int block_log2, float* scales, uint8_t* codes);
int peerd_dequantize(const uint8_t* codes, const float* scales, int64_t n, int code, int block_log2, void* out,
                     int dtype);
int peerd_quantize_missing(const float* x, int64_t n, int code, int block_log2, float* scales, uint8_t* codes,
                           float* missed, int more, float* seen);
int peerd_dequantize_onto(const uint8_t* codes, const float* scales, int64_t n, int code, int block_log2,
                          const float* base, float* out);
int peerd_scales(const void* x, int dtype, int64_t n, int block_log2, float* scales);
int peerd_isa(void);
int peerd_use_isa(int isa);
}

namespace {

enum Function { QUANTIZE, DEQUANTIZE, SCALES, QUANTIZE_MISSING, DEQUANTIZE_ONTO };
constexpr int INPUTS = 3, OUTPUTS = 4, NUMBERS = 6 + INPUTS + OUTPUTS;
constexpr uint8_t MARGIN = 0xA5;

class Buffer {
public:
    Buffer(int64_t size, size_t off)
        : bytes(static_cast<size_t>(size) + off + 64, MARGIN), size(static_cast<size_t>(size)), off(off) {}
    bool empty() const { return size == 0; }
    uint8_t* begin() { return bytes.data() + off; }
    void* any() { return begin(); }
    float* singles() { return static_cast<float*>(any()); }
    bool read(FILE* from) { return fread(begin(), 1, size, from) == size; }
    void write(FILE* to) {
        for (size_t i = 0; i < bytes.size(); ++i) {
            if ((i >= off && i < off + size) || bytes[i] == MARGIN) continue;
            fprintf(stderr, "a call wrote outside of its output\n");
            exit(3);
        }
        fwrite(begin(), 1, size, to);
    }

private:
    std::vector<uint8_t> bytes;
    size_t size, off;
};

}  // namespace

int main(int count, char** words) {
    FILE* from = count == 3 ? fopen(words[1], "rb") : nullptr;
    FILE* to = count == 3 ? fopen(words[2], "wb") : nullptr;
    if (from == nullptr || to == nullptr) return 2;
    int64_t call[NUMBERS];
    while (fread(call, 8, NUMBERS, from) == NUMBERS) {
        const int dtype = static_cast<int>(call[2]), code = static_cast<int>(call[3]), log2 = static_cast<int>(call[4]);
        const int64_t n = call[5];
        const size_t off = call[0] < QUANTIZE_MISSING ? 1 : 4;
        std::vector<Buffer> in, out;
        for (int i = 0; i < INPUTS; ++i) in.emplace_back(call[6 + i], off);
        for (int i = 0; i < OUTPUTS; ++i) out.emplace_back(call[6 + INPUTS + i], off);
        for (Buffer& each : in)
            if (!each.read(from)) return 2;
        int64_t status = call[1] < 0 ? 0 : peerd_use_isa(static_cast<int>(call[1]));
        if (status == 0 && call[0] == QUANTIZE)
            status = peerd_quantize(in[0].any(), dtype, n, code, log2, out[1].singles(), out[0].begin());
        if (status == 0 && call[0] == DEQUANTIZE)
            status = peerd_dequantize(in[0].begin(), in[1].singles(), n, code, log2, out[0].any(), dtype);
        if (status == 0 && call[0] == SCALES) status = peerd_scales(in[0].any(), dtype, n, log2, out[0].singles());
        if (status == 0 && call[0] == QUANTIZE_MISSING) {
            const bool more = !in[1].empty();  // what stands there
            if (more) memcpy(out[2].begin(), in[1].begin(), static_cast<size_t>(n) * sizeof(float));
            status = peerd_quantize_missing(in[0].singles(), n, code, log2, out[1].singles(), out[0].begin(),
                                            out[2].singles(), more, out[3].singles());
        }
        if (status == 0 && call[0] == DEQUANTIZE_ONTO)
            status = peerd_dequantize_onto(in[0].begin(), in[1].singles(), n, code, log2, in[2].singles(),
                                           out[0].singles());
        if (status == 0) status = peerd_isa();
        fwrite(&status, 8, 1, to);
        for (Buffer& each : out) each.write(to);
    }
    return fclose(to) == 0 ? 0 : 2;
}
