/* Carries out calls of the quantization library that a file lists, and writes what came back to another.

Built together with blockwise.cpp for another processor, or with checks that a library loaded into Python cannot have.
A call is six whole numbers of 8 bytes (function, instruction set, dtype, code, block_log2, n), the sizes of its inputs
and outputs, and the inputs; its answer is the status and the outputs. Outputs are longer than said by a margin whose
content has to survive. Inputs and outputs are placed one byte off an aligned address. */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

extern "C" {
int peerd_quantize(const void* x, int dtype, int64_t n, int code, int block_log2, float* scales, uint8_t* codes);
int peerd_dequantize(const uint8_t* codes, const float* scales, int64_t n, int code, int block_log2, void* out,
                     int dtype);
int peerd_scales(const void* x, int dtype, int64_t n, int block_log2, float* scales);
int peerd_isa(void);
int peerd_use_isa(int isa);
}

namespace {

enum Function { QUANTIZE, DEQUANTIZE, SCALES };
constexpr uint8_t MARGIN = 0xA5;

class Buffer {
public:
    explicit Buffer(int64_t size) : bytes(static_cast<size_t>(size) + 1 + 64, MARGIN), size(static_cast<size_t>(size)) {}
    uint8_t* begin() { return bytes.data() + 1; }
    void* any() { return begin(); }
    float* singles() { return static_cast<float*>(any()); }
    bool read(FILE* from) { return fread(begin(), 1, size, from) == size; }
    void write(FILE* to) {
        for (size_t i = 0; i < 65; ++i) {
            if (bytes[i == 0 ? 0 : size + i] == MARGIN) continue;
            fprintf(stderr, "a call wrote outside of its output\n");
            exit(3);
        }
        fwrite(begin(), 1, size, to);
    }

private:
    std::vector<uint8_t> bytes;
    size_t size;
};

}  // namespace

int main(int count, char** words) {
    FILE* from = count == 3 ? fopen(words[1], "rb") : nullptr;
    FILE* to = count == 3 ? fopen(words[2], "wb") : nullptr;
    if (from == nullptr || to == nullptr) return 2;
    int64_t call[10];
    while (fread(call, 8, 10, from) == 10) {
        const int dtype = static_cast<int>(call[2]), code = static_cast<int>(call[3]), log2 = static_cast<int>(call[4]);
        const int64_t n = call[5];
        Buffer in1(call[6]), in2(call[7]), out1(call[8]), out2(call[9]);
        if (!in1.read(from) || !in2.read(from)) return 2;
        int64_t status = call[1] < 0 ? 0 : peerd_use_isa(static_cast<int>(call[1]));
        if (status == 0 && call[0] == QUANTIZE)
            status = peerd_quantize(in1.any(), dtype, n, code, log2, out2.singles(), out1.begin());
        if (status == 0 && call[0] == DEQUANTIZE)
            status = peerd_dequantize(in1.begin(), in2.singles(), n, code, log2, out1.any(), dtype);
        if (status == 0 && call[0] == SCALES) status = peerd_scales(in1.any(), dtype, n, log2, out1.singles());
        if (status == 0) status = peerd_isa();
        fwrite(&status, 8, 1, to);
        out1.write(to);
        out2.write(to);
    }
    return fclose(to) == 0 ? 0 : 2;
}
