// A driver and an NVRTC without a GPU, for tests of the code that calls them: "compiling" notes what was asked for,
// and a launch runs the kernel of blockwise.cu on the CPU (cuda_shim.cpp). Misuse that a real driver would punish is
// reported: no current context, unknown handles, wrong shapes. Any call can be told to fail.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <dlfcn.h>

extern "C" const char* peerd_shim_run(void (*which)(const void*), const void* its, int blocks, int threads,
                                      uint64_t seed, int only);

namespace {

struct Launch {
    std::string name;
    unsigned blocks, threads;
    void* stream;
};
struct Program {
    std::string source, header, image, log;
};
struct Function {
    void* entry;
    std::string name;
};

enum { INVALID_VALUE = 1, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500, LAUNCH_FAILED = 719 };

std::mutex lock;
std::map<std::string, int> failing;
std::vector<std::string> calls;
std::vector<Launch> launches;
std::string complaint;
int capability[2] = {9, 0}, retained;
thread_local int depth;  // contexts pushed on this thread
char context_tag;

int begin(const char* call) {
    std::lock_guard<std::mutex> held(lock);
    calls.push_back(call);
    const auto told = failing.find(call);
    return told == failing.end() ? 0 : told->second;
}

int misuse(const char* what, int code) {
    complaint = what;
    return code;
}

int copy(const std::string& from, char* to) {
    std::memcpy(to, from.data(), from.size() + 1);
    return 0;
}

}  // namespace

#define CALL(name) \
    if (const int told = begin(name)) return told
#define IN_CONTEXT \
    if (depth == 0) return misuse("no context is current", INVALID_CONTEXT)

extern "C" {

// --- for tests ------------------------------------------------------------------------------------------------------

void fake_reset() {
    failing.clear();
    calls.clear();
    launches.clear();
    complaint.clear();
    capability[0] = 9;
    capability[1] = 0;
}
void fake_fail(const char* call, int code) { failing[call] = code; }
void fake_capability(int major, int minor) {
    capability[0] = major;
    capability[1] = minor;
}
int fake_calls(const char* call) {
    int count = 0;
    for (const auto& each : calls) count += each == call;
    return count;
}
int fake_launches() { return (int)launches.size(); }
const char* fake_launch(int which, unsigned* blocks, unsigned* threads, void** stream) {
    *blocks = launches[which].blocks;
    *threads = launches[which].threads;
    *stream = launches[which].stream;
    return launches[which].name.c_str();
}
const char* fake_complaint() { return complaint.c_str(); }
int fake_depth() { return depth; }

// --- the driver -----------------------------------------------------------------------------------------------------

int cuInit(unsigned flags) {
    CALL("cuInit");
    return flags ? INVALID_VALUE : 0;
}
int cuDriverGetVersion(int* version) {
    CALL("cuDriverGetVersion");
    *version = 12080;
    return 0;
}
int cuDeviceGet(int* device, int ordinal) {
    CALL("cuDeviceGet");
    *device = ordinal + 100;
    return ordinal < 2 ? 0 : 101;
}
int cuDeviceGetAttribute(int* value, int which, int device) {
    CALL("cuDeviceGetAttribute");
    if (device < 100) return misuse("not a device", INVALID_VALUE);
    *value = which == 16 ? 2 : which == 75 ? capability[0] : which == 76 ? capability[1] : -1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
    CALL("cuDevicePrimaryCtxRetain");
    if (device < 100) return misuse("not a device", INVALID_VALUE);
    retained++;
    *context = &context_tag;
    return 0;
}
int cuCtxPushCurrent_v2(void* context) {
    CALL("cuCtxPushCurrent_v2");
    if (context != &context_tag) return misuse("not a context", INVALID_CONTEXT);
    depth++;
    return 0;
}
int cuCtxPopCurrent_v2(void** context) {
    IN_CONTEXT;
    *context = &context_tag;
    depth--;
    return 0;
}
int cuModuleLoadData(void** module, const char* image) {
    CALL("cuModuleLoadData");
    IN_CONTEXT;
    if (std::strncmp(image, "image ", 6)) return misuse("not an image", INVALID_IMAGE);
    *module = new std::string(image);
    return 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    CALL("cuModuleGetFunction");
    IN_CONTEXT;
    const std::string& image = *(std::string*)module;
    static const char* const numbered[][2] = {{"_dynamic8_", "PEERD_ONLY=16"}, {"_int8_", "PEERD_ONLY=17"},
                                              {"_int4_", "PEERD_ONLY=18"},     {"_nf4_", "PEERD_ONLY=19"},
                                              {"_e4m3_", "PEERD_ONLY=20"},     {"peerd_scales_", "PEERD_ONLY=0"}};
    bool inside = false;
    for (const auto& pair : numbered) inside |= std::strstr(name, pair[0]) && image.find(pair[1]) != std::string::npos;
    void* entry = inside ? dlsym(RTLD_DEFAULT, name) : nullptr;
    if (inside && !entry) {
        Dl_info here;
        dladdr((void*)&cuModuleGetFunction, &here);
        entry = dlsym(dlopen(here.dli_fname, RTLD_NOLOAD | RTLD_LAZY), name);
    }
    if (!entry) return misuse(name, NOT_FOUND);
    *function = new Function{entry, name};
    return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads, size_t shared) {
    CALL("cuOccupancyMaxActiveBlocksPerMultiprocessor");
    IN_CONTEXT;
    if (!function || threads != 256 || shared) return misuse("occupancy of something else", INVALID_VALUE);
    *blocks = 2;
    return 0;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** parameters, void** extra) {
    CALL("cuLaunchKernel");
    IN_CONTEXT;
    if (gy != 1 || gz != 1 || by != 1 || bz != 1 || shared || extra) return misuse("a shape", INVALID_VALUE);
    std::lock_guard<std::mutex> held(lock);
    const auto* its = (const Function*)function;
    launches.push_back({its->name, gx, bx, stream});
    const auto entry = (void (*)(const void*))its->entry;
    const char* why = peerd_shim_run(entry, parameters[0], (int)gx, (int)bx, launches.size(), -1);
    return why ? misuse(why, LAUNCH_FAILED) : 0;
}
int cuGetErrorName(int code, const char** text) {
    static const std::map<int, const char*> names = {{2, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                     {100, "CUDA_ERROR_NO_DEVICE"},
                                                     {101, "CUDA_ERROR_INVALID_DEVICE"},
                                                     {200, "CUDA_ERROR_INVALID_IMAGE"},
                                                     {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
                                                     {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
                                                     {500, "CUDA_ERROR_NOT_FOUND"},
                                                     {719, "CUDA_ERROR_LAUNCH_FAILED"}};
    const auto found = names.find(code);
    *text = found == names.end() ? nullptr : found->second;
    return found == names.end() ? INVALID_VALUE : 0;
}

// --- NVRTC ----------------------------------------------------------------------------------------------------------

int nvrtcVersion(int* major, int* minor) {
    CALL("nvrtcVersion");
    *major = 12;
    *minor = 8;
    return 0;
}
int nvrtcGetNumSupportedArchs(int* count) {
    CALL("nvrtcGetNumSupportedArchs");
    *count = 4;
    return 0;
}
int nvrtcGetSupportedArchs(int* found) {
    CALL("nvrtcGetSupportedArchs");
    const int known[] = {75, 80, 90, 100};
    std::memcpy(found, known, sizeof(known));
    return 0;
}
int nvrtcCreateProgram(void** program, const char* source, const char*, int count, const char* const* headers,
                       const char* const* names) {
    CALL("nvrtcCreateProgram");
    if (count < 1 || std::strcmp(names[0], "tables.h")) return misuse("the headers", 4);
    *program = new Program{source, headers[0], "", ""};
    return 0;
}
int nvrtcCompileProgram(void* program, int count, const char* const* options) {
    auto* its = (Program*)program;
    its->image = "image";
    for (int i = 0; i < count; i++) its->image += std::string(" ") + options[i];
    its->log = "peerd.cu(7): warning: a warning\npeerd.cu(9): error: a mistake\n1 error detected";
    CALL("nvrtcCompileProgram");
    const bool ours = its->source.find("__global__") != std::string::npos && its->header.find("PEERD_") != std::string::npos;
    return ours ? 0 : misuse("the source", 6);
}
int nvrtcGetProgramLogSize(void* program, size_t* size) {
    *size = ((Program*)program)->log.size() + 1;
    return 0;
}
int nvrtcGetProgramLog(void* program, char* to) { return copy(((Program*)program)->log, to); }
int nvrtcGetCUBINSize(void* program, size_t* size) {
    CALL("nvrtcGetCUBINSize");
    *size = ((Program*)program)->image.size() + 1;
    return 0;
}
int nvrtcGetCUBIN(void* program, char* to) { return copy(((Program*)program)->image, to); }
int nvrtcGetPTXSize(void* program, size_t* size) {
    CALL("nvrtcGetPTXSize");
    *size = ((Program*)program)->image.size() + 1;
    return 0;
}
int nvrtcGetPTX(void* program, char* to) { return copy(((Program*)program)->image, to); }
int nvrtcDestroyProgram(void** program) {
    CALL("nvrtcDestroyProgram");
    delete (Program*)*program;
    *program = nullptr;
    return 0;
}
const char* nvrtcGetErrorString(int code) { return code == 3 ? "NVRTC_ERROR_INVALID_INPUT" : "NVRTC_ERROR_OTHER"; }

}  // extern "C"
