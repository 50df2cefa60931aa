// The Hopper decode kernels, warp-specialised: a block has one row, one split and 64 heads (attend.cuh), or 8, 16 or 32
// (few_heads.cuh).
//
//   index lists -> 2 gathering warpgroups -> keys[2], bf16 tiles of 64 keys -> 2 consuming warpgroups -> results
//   results in shared memory -> all warps -> partials, or with one split the epilogue and the outputs
//
// barrier          who arrives                   what becomes true
// full[stage]      the 8 gathering warps         the tile and its attended keys lie in keys[stage]
// empty[stage]     the 8 consuming warps         all products that read keys[stage] are done
// kConsumersMeet   both consuming warpgroups     Q is in shared memory; a tile's P and decay are; keys are not needed
// again kScoresMeet      warpgroup 0, few heads        every warp's maxima of the tile are in shared memory
//
// Shared memory at 64 heads, of 227 KiB: Q 64, two tiles 128, P 16, and 1 for barriers, decay, masks. At 32 heads: two
// tiles 128, Q 32, P 8. Registers of a thread at 64 heads: O 128, scores 32: 192 in warpgroup 0, 160 in warpgroup 1; a
// quarter of a raw row 36, and where it goes and where the next one lies: 80 in the gathering warpgroups.
//
// Nanoseconds a key and SM at 1.98 GHz, predicted before the code was written, and measured on an H200 by leaving
// stages out (rows of 8320 keys, unsplit, one a SM):
//                          predicted                                              measured at 64, 32, 16 heads a block
//   device memory          18   584 bytes at 4.27 TB/s over 132 SMs
//   gather, random rows    24   measured alone, 256 threads, a whole tile in flight       34      25     25
//   conversion             11   8 integer instructions for 4 codes, half rate             16      14     15
//   tensor cores           16   Q K^T and P V, 16 cycles each
//   shared memory          17   tile written 4, read 8 + 8, Q 8, P 4 cycles
//   a tile's chain         22   S, weights, P V one after another                         28      24     19
//   all                    24 to 30                                                       45      34     30
// The chain is as long as predicted, 24 % more; the gather is not, and the two do not hide each other fully.
#include <atomic>

#include "common/launch.h"
#include "common/ptx.cuh"
#include "decode/sm90/attend.cuh"
#include "decode/sm90/few_heads.cuh"
#include "decode/sm90/gather.cuh"
#include "decode/sm90/output.cuh"
#include "decode/sm90/sparse_decode.h"

namespace sgl_dsv4::sm90 {
namespace {

// ---- what both kernels do before and after their roles ----

// What a block knows before it may read anything.
struct Start {
  Part part;
  Lengths lengths;
  Guess guess;  // of the gathering warps
};

// Barriers and addresses, then the previous kernel's end.
template <typename Shared>
__device__ __forceinline__ Start begin(const DecodeParams& p, int block_heads, Shared& shared) {
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[stage]), kGatherThreads / 32);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[stage]), kConsumerThreads / 32);
    }
    ptx::mbarrier_init_fence();
  }
  Start start;
  start.part = my_part(p, block_heads);
  start.lengths = find_lengths(p, start.part);
  if (threadIdx.x >= kConsumerThreads) {
    start.guess = guess_keys(p, start.part);
    for (const int32_t*& at : start.guess.at) ptx::keep(at);
  }
  for (const int32_t*& at : start.lengths.at) ptx::keep(at);
  __syncthreads();
  ptx::griddepcontrol_wait();
  return start;
}

// By all warps. `any`: the block has keys.
template <typename Shared>
__device__ __forceinline__ void write_results(const DecodeParams& p, bool any, int block_heads, int pitch,
                                              const Shared& shared) {
  const Part part = my_part(p, block_heads);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (!any) {
    write_empty(p, part, warp, kThreads / 32);
    return;
  }
  __syncthreads();
  const float* results = reinterpret_cast<const float*>(shared.keys);
  if (p.o_accum != nullptr) {
    write_partials(p, part, results, pitch, shared.unit, shared.total, warp, kThreads / 32);
  } else {
    write_outputs(p.finish, part, results, pitch, shared.unit, shared.total, shared.sink, shared.rotation, warp,
                  kThreads / 32);
  }
}

__device__ __forceinline__ int my_warpgroup() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
}

// ---- 64 heads a block ----

__global__ void __launch_bounds__(kThreads, 1) sparse_decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_bytes);
  const Start start = begin(p, kTileHeads, shared);
  const int warpgroup = my_warpgroup();
  bool any;
  if (warpgroup >= 2) {
    ptx::setmaxnreg_dec<kGatherRegisters>();
    any = gather(p, start.part, start.lengths, start.guess, shared);
  } else if (warpgroup == 0) {
    ptx::setmaxnreg_inc<kScoreRegisters>();
    const Work w = my_work(p, start.part, start.lengths, load(start.lengths));
    any = !w.range.empty();
    if (any) attend<0>(p, w, shared);
    ptx::setmaxnreg_dec<kGatherRegisters>();
  } else {
    ptx::setmaxnreg_inc<kValueRegisters>();
    const Work w = my_work(p, start.part, start.lengths, load(start.lengths));
    any = !w.range.empty();
    if (any) attend<1>(p, w, shared);
    ptx::setmaxnreg_dec<kGatherRegisters>();
  }
  write_results(p, any, kTileHeads, kResultPitch, shared);
}

// ---- 8, 16 or 32 heads a block ----

template <int kHeads>
__global__ void __launch_bounds__(kThreads, 1) few_heads_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<FewHeadsSharedMemory<kHeads>*>(shared_bytes);
  const Start start = begin(p, kHeads, shared);
  const int warpgroup = my_warpgroup();
  bool any;
  if (warpgroup >= 2) {
    ptx::setmaxnreg_dec<kFewGatherRegisters>();
    any = gather(p, start.part, start.lengths, start.guess, shared);
  } else if (warpgroup == 0) {
    ptx::setmaxnreg_inc<kFewScoreRegisters>();
    const Work w = my_work(p, start.part, start.lengths, load(start.lengths));
    any = !w.range.empty();
    if (any) FewHeads<kHeads>::template attend<0>(p, w, shared);
    ptx::setmaxnreg_dec<kFewGatherRegisters>();
  } else {
    const Work w = my_work(p, start.part, start.lengths, load(start.lengths));
    any = !w.range.empty();
    if (any) FewHeads<kHeads>::template attend<1>(p, w, shared);
    ptx::setmaxnreg_dec<kFewGatherRegisters>();
  }
  write_results(p, any, kHeads, kFewResultPitch, shared);
}

// ---- host ----

struct Variant {
  int block_heads;
  void (*kernel)(DecodeParams);
  size_t shared_bytes;
};

constexpr Variant kVariants[] = {
    {8, few_heads_kernel<8>, sizeof(FewHeadsSharedMemory<8>)},
    {16, few_heads_kernel<16>, sizeof(FewHeadsSharedMemory<16>)},
    {32, few_heads_kernel<32>, sizeof(FewHeadsSharedMemory<32>)},
    {kTileHeads, sparse_decode_kernel, sizeof(SharedMemory)},
};

}  // namespace

cudaError_t sparse_decode_device_code() {
  static std::atomic<bool> loaded[kMaxDevices];
  int device = 0;
  if (cudaError_t err = cudaGetDevice(&device); err != cudaSuccess) return err;
  if (device < kMaxDevices && loaded[device].load(std::memory_order_relaxed)) return cudaSuccess;
  for (const Variant& v : kVariants) {
    if (cudaError_t err = cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(v.shared_bytes));
        err != cudaSuccess)
      return err;
  }
  if (device < kMaxDevices) loaded[device].store(true, std::memory_order_relaxed);
  return cudaSuccess;
}

cudaError_t launch_sparse_decode(const DecodeParams& params, bool pdl, cudaStream_t stream) {
  DecodeParams p = params;
  if (p.num_tokens == 0) return cudaSuccess;
  if (p.num_heads < 1 || p.num_splits < 1 || (p.o_accum == nullptr && p.num_splits != 1)) return cudaErrorInvalidValue;
  if (cudaError_t err = sparse_decode_device_code(); err != cudaSuccess) return err;
  for (const Variant& v : kVariants) {
    if (v.block_heads != p.block_heads) continue;
    const int64_t groups = (p.num_heads + v.block_heads - 1) / v.block_heads;
    const int64_t blocks = groups * p.num_splits * p.num_tokens;
    if (blocks > INT32_MAX) return cudaErrorInvalidValue;
    p.groups = make_divisor(static_cast<int32_t>(groups));
    p.splits = make_divisor(p.num_splits);
    return launch_kernel(v.kernel, dim3(static_cast<uint32_t>(blocks)), dim3(kThreads), v.shared_bytes, pdl, stream, p);
  }
  return cudaErrorInvalidValue;
}

}  // namespace sgl_dsv4::sm90
