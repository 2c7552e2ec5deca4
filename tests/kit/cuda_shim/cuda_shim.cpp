// Runs blockwise.cu on a CPU: see cuda_shim.h. Exports `peerd_shim_run`, which stands for a launch of one kernel.
#include "cuda_shim.h"

#include <ucontext.h>

#include <memory>
#include <mutex>
#include <string>

#include "blockwise.cu"

Index threadIdx, blockIdx, blockDim, gridDim;
extern "C" char __start_peerd_shared[], __stop_peerd_shared[];

namespace {

const int MOST_THREADS = 512, STACK_BYTES = 64 * 1024;
enum State { READY, AT_BARRIER, AT_SHUFFLE, ENDED };

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    State state;
    unsigned offered, taken;
    int distance;
};

Fiber fibers[MOST_THREADS];
std::mutex lock;
ucontext_t scheduler;
int current;
uint64_t random_state = 1;
std::string failure;
void (*kernel)(const Job);
const Job* job;

unsigned draw(unsigned below) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)((random_state >> 33) % below);
}

void body() {
    kernel(*job);
    fibers[current].state = ENDED;
    swapcontext(&fibers[current].context, &scheduler);
}

void wait(State state) {
    Fiber& fiber = fibers[current];
    fiber.state = state;
    swapcontext(&fiber.context, &scheduler);
}

// All lanes have arrived at the same shuffle: exchange and go on.
bool exchange(int warp) {
    Fiber* lane = fibers + warp * 32;
    for (int i = 0; i < 32; i++) {
        if (lane[i].state != AT_SHUFFLE) return false;
        if (lane[i].distance != lane[0].distance) peerd_shim_fail("lanes shuffle over different distances");
    }
    for (int i = 0; i < 32; i++) lane[i].taken = lane[i ^ lane[0].distance].offered;
    for (int i = 0; i < 32; i++) lane[i].state = READY;
    return true;
}

void run_block(int threads) {
    for (char* at = __start_peerd_shared; at < __stop_peerd_shared; at++) *at = (char)draw(256);
    for (int i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, body, 0);
        fiber.state = READY;
    }
    const int warps = threads / 32;
    const unsigned slow = draw(1u << warps);  // these warps run only when no other can: a missing barrier shows
    for (bool all = false; failure.empty();) {
        int ran = 0, waiting = 0, ended = 0;
        const int first = (int)draw((unsigned)warps), from = (int)draw(32);
        for (int i = 0; i < threads; i++) {
            current = ((i / 32 + first) % warps) * 32 + (i + from) % 32;
            if (fibers[current].state != READY || (!all && slow >> (current / 32) & 1)) continue;
            threadIdx.x = (unsigned)current;
            ran++;
            swapcontext(&scheduler, &fibers[current].context);
            if (draw(64) == 0) break;  // others may get far ahead
        }
        for (int warp = 0; warp < warps; warp++) ran += exchange(warp);
        for (int i = 0; i < threads; i++) {
            waiting += fibers[i].state == AT_BARRIER;
            ended += fibers[i].state == ENDED;
        }
        if (ended == threads) return;
        if (waiting == threads) {
            for (int i = 0; i < threads; i++) fibers[i].state = READY;
        } else if (ran == 0 && all) {
            peerd_shim_fail("threads wait for others that never come");
        }
        all = ran == 0;
    }
}

}  // namespace

void peerd_shim_fail(const char* why) {
    if (failure.empty()) failure = why;
}

void __syncthreads() { wait(AT_BARRIER); }

unsigned __shfl_xor_sync(unsigned mask, unsigned value, int distance) {
    if (mask != 0xFFFFFFFFu) peerd_shim_fail("only whole warps shuffle here");
    fibers[current].offered = value;
    fibers[current].distance = distance;
    wait(AT_SHUFFLE);
    return fibers[current].taken;
}

// Run a kernel over a grid, or only one block of it; null, or what went wrong. The seed says in which order.
extern "C" const char* peerd_shim_run(void (*which)(const Job), const Job* its, int blocks, int threads, uint64_t seed,
                                      int only) {
    const std::lock_guard<std::mutex> held(lock);
    failure.clear();
    if (threads % 32 || threads > MOST_THREADS || blocks < 1) return "no such launch";
    kernel = which;
    job = its;
    random_state = seed * 2 + 1;
    gridDim.x = (unsigned)blocks;
    blockDim.x = (unsigned)threads;
    const int first = only < 0 ? 0 : only, end = only < 0 ? blocks : only + 1;
    for (int block = first; block < end && failure.empty(); block++) {
        blockIdx.x = (unsigned)block;
        run_block(threads);
    }
    return failure.empty() ? nullptr : failure.c_str();
}
