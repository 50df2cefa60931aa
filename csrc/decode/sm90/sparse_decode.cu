// The Hopper decode kernels, warp-specialised: a block has one row, one split and 64, 32, 16 or 8 heads. With 8
// (eight_heads.cuh), 16 and 32 (few_heads.cuh) a tile's rows stay in shared memory as the cache has them
// (raw_tiles.cuh); roles and barriers are in the head comments of these files. There are kernels too whose blocks take
// one row after the other (eight_parts.cuh, few_parts.cuh, many_parts.cuh), and with fewer than 64 heads some of which
// two merge the splits of a row (pairs.cuh). With 64 heads (gather.cuh, attend.cuh):
//
//   index lists -> cp.async ring -> 2 gathering warpgroups -> keys[2], bf16 tiles of 64 keys
//   keys -> 2 attending warpgroups, a tile in turn: scores, softmax -> weights -> both: O = O decay + P V
//   results in shared memory -> all warps -> partials, or with one split the epilogue and the outputs
//
// barrier           who arrives             what becomes true
// full[stage][h]    gathering threads       half h of the tile's channels is in keys[stage]; h = 1: attended too
// empty[stage][h]   attending warpgroup h   all products that read half h of keys[stage] are done
// measured[stage]   attending warpgroup     measured[stage]: what the scores of the tile there are measured against
//                     `stage`
// weighed[stage]    the same                the tile's P is in shared memory
// kConsumersMeet    warpgroups 0 and 1      first: Q, normalised and rotated, is in shared memory; then: all products
//                                           are done, warpgroup 1's sums are in shared memory
// kRoleEnds + w     warpgroup w: 0, 1       its warps may give registers back
// __syncthreads     all                     results, inverses and factors are in shared memory, registers given back
//
// Every thread arrives: what it stored is then ordered before the end of the phase without a barrier of its warp. What
// ordinary stores left for wgmma, the threads that issue wgmma fence, after their wait: the gathering threads' fence
// would include their own accesses under way.
//
// Shared memory, of 227 KiB. 64 heads: Q 64, two tiles 128, P 8, ring 24, and 2 for barriers, units, masks. 8, 16, 32:
// four raw tiles 151 (rows 144, scales and their factors 6), scores 17, 9, 17, Q 8, 16, 32, P 2, 4, 8.
//
// Registers of a thread. 64 heads: O 128, scores 32 and P 16 of 208 in an attending warpgroup, 48 in a gathering one;
// 8 fewer would not do in either. 32, 16: O 64 of 120, 32 of 104 in a value warp; two sums of scores 32, 16 and
// operands 32 of 72, 88 in a scoring one; 40 in a copying, 56 in a weighing one. 8: O 8, Q 16 and 32 of a tile's
// values, of 96 in an attending warp, 48 in the others.
//
// Nanoseconds a key and SM on an H200, unsplit, one row a SM, 64 heads a block. Parts were measured by leaving the
// others out; all is what 512 keys more take (128 rows, benchmark/results/h200/sparse_decode.csv):
//
//   device memory        18    584 bytes at 4.27 TB/s over 132 SMs
//   shared memory        22    tile written 8, ring 9, K 8, V 8, Q 8, P 2, times 128 bytes a cycle
//   tensor cores         16    Q K^T and P V
//   gather, conversion   19    measured
//   scores to P V        28    measured, with one warpgroup for all scores instead of two
//   all                  32    measured
//
// Around the tiles, cycles (1.755 GHz) by clock reads in an instrumented build, 64 heads a block, unsplit, 128 + 512
// keys: 32 rows | 128 rows, where the first copies wait for the device memory:
//
//   index there, row asked for       1350 | 1630      first tile converted                   4280 | 9220
//   first chunk of the row there     1990 | 5790      it is scored | and weighed       5910, 7300 | 10790, 11910
//   Q there                          2720 | 7570      last P V to results in shared memory   2190 | 2090
//                                                     to outputs written                     4440 | 4490
//
// What keeps the parts from hiding each other: two tiles are little slack. A tile is filled (2100 cycles), scored
// (1500, shared memory is contended), weighed (1100) and added by both warpgroups (1000 each, one later than the other)
// before it can be filled again.
#include <algorithm>

#include "common/launch.h"
#include "common/ptx.cuh"
#include "common/tensor_map.h"
#include "decode/sm90/attend.cuh"
#include "decode/sm90/eight_heads.cuh"
#include "decode/sm90/eight_parts.cuh"
#include "decode/sm90/few_heads.cuh"
#include "decode/sm90/few_parts.cuh"
#include "decode/sm90/gather.cuh"
#include "decode/sm90/many_parts.cuh"
#include "decode/sm90/output.cuh"
#include "decode/sm90/pairs.cuh"
#include "decode/sm90/raw_tiles.cuh"
#include "decode/sm90/sparse_decode.h"

namespace sgl_dsv4::sm90 {
namespace {

// ---- 64 heads a block ----

// What a block knows before it may read anything.
struct Start {
  Part part;
  Lengths lengths;
  Guess guess;  // of the gathering warps
};

// Barriers and addresses, then the previous kernel's end.
__device__ __forceinline__ Start begin(const DecodeParams& p, int warpgroup, SharedMemory& shared) {
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    init_barriers(shared.barriers);
    ptx::mbarrier_init_fence();
  }
  Start start;
  start.part = my_part(p, kTileHeads);
  start.lengths = find_lengths(p, start.part);
  if (gathers(warpgroup)) start.guess = guess_keys(p, start.part, gather_key(static_cast<int>(threadIdx.x)));
  for (const int32_t*& at : start.lengths.at) ptx::keep(at);
  __syncthreads();
  ptx::griddepcontrol_wait();
  return start;
}

// The beginning of the role that does not gather: Q in shared memory, and the block's work. What does not depend on the
// lengths is asked for beside them. `any`: the block has keys.
__device__ __forceinline__ Work begin_attending(const DecodeParams& p, const Start& start, SharedMemory& shared,
                                                bool& any) {
  const uint32_t q = ptx::shared_address(shared.q);
  const RowLengths lengths = load(start.lengths);
  const query::Position position = load_q(p, start.part, q);
  const Work w = my_work(p, start.part, start.lengths, lengths);
  any = !w.range.empty();
  if (any) {
    finish_q(p, w, position, q);
  } else {
    ptx::cp_async_wait();
  }
  return w;
}

// The end of the role that does not gather. PTX ISA, "setmaxnreg": between two of them the warps of a warpgroup meet.
__device__ __forceinline__ void end_role(int warpgroup) {
  ptx::bar_sync(kRoleEnds + warpgroup, kWarpgroupThreads);
  ptx::setmaxnreg_dec<kGatherRegisters>();
}

// By all threads. `any`: the block has keys. All have the registers of a gathering warpgroup, and get back those that
// they were launched with.
__device__ __forceinline__ void write_results(const DecodeParams& p, bool any, const SharedMemory& shared) {
  const Part part = my_part(p, kTileHeads);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  constexpr int kWarps = kTileThreads / 32;
  if (!any) {
    write_empty(p, part, warp, kWarps);
    return;
  }
  __syncthreads();
  ptx::setmaxnreg_inc<kLaunchRegisters>();
  const float* results = reinterpret_cast<const float*>(shared.keys);
  if (p.o_accum != nullptr) {
    write_partials(p, part, results, kResultPitch, shared, warp, kWarps);
  } else {
    write_outputs(p.finish, part, results, kResultPitch, shared, warp, kWarps);
  }
}

__global__ void __launch_bounds__(kTileThreads, 1) sparse_decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_bytes);
  const int warpgroup = my_warpgroup();
  const Start start = begin(p, warpgroup, shared);
  bool any;
  if (gathers(warpgroup)) {
    ptx::setmaxnreg_dec<kGatherRegisters>();
    any = gather(p, start.part, start.lengths, start.guess, shared);
  } else {
    const Work w = begin_attending(p, start, shared, any);
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    if (any) attend(p, w, warpgroup, shared);
    end_role(warpgroup);
  }

  write_results(p, any, shared);
}

// A block takes one part after the other.
template <bool kCut>
__global__ void __launch_bounds__(kTileThreads, 1) many_parts_kernel(const __grid_constant__ PartsParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  PartsMemory& shared = *reinterpret_cast<PartsMemory*>(shared_bytes);
  const int warpgroup = my_warpgroup();
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    init_barriers(shared.barriers);
    ptx::mbarrier_init(ptx::shared_address(&shared.q_full), 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (gathers(warpgroup)) {
    ptx::setmaxnreg_dec<kGatherRegisters>();
    gather_parts<kCut>(p, shared);
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    ptx::griddepcontrol_wait();
    attend_parts<kCut>(p, warpgroup, shared);
  }
}

// ---- 8, 16 or 32 heads a block ----

// Kernel: its roles. Other roles than the attending one end where they are: what comes behind a branch has one limit of
// registers. They give registers back before they wait for the kernel before, since with 8 and 32 heads attending
// warps take some before they do: with 8 heads this is 0.4 us, warm, of 5.1 at 1 row.
template <typename Kernel, bool kPairs>
__global__ void __launch_bounds__(kRawThreads, 1) raw_tiles_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_bytes);
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    init_raw_barriers(shared);
    ptx::mbarrier_init_fence();
  }
  const int warp = my_warp();
  const Part part = kPairs ? my_part_of_pair(p, Kernel::kBlockHeads) : my_part(p, Kernel::kBlockHeads);
  Lengths lengths = find_lengths(p, part);
  Guess guess;
  if (copies(warp)) guess = guess_keys(p, part, copy_key());
  for (const int32_t*& at : lengths.at) ptx::keep(at);
  __syncthreads();

  if (weighs(warp)) {
    ptx::setmaxnreg_dec<Kernel::kWeighRegisters>();
    ptx::griddepcontrol_wait();
    if (Kernel::template weigh_tiles<kPairs>(p, part, lengths, shared)) ptx::bar_sync(0, kRawThreads);
    if constexpr (kPairs) pass_cluster_barriers();
    return;
  }
  if (copies(warp)) {
    ptx::setmaxnreg_dec<Kernel::kCopyRegisters>();
    ptx::griddepcontrol_wait();
    if (copy_tiles(p, part, lengths, guess, shared)) ptx::bar_sync(0, kRawThreads);
    if constexpr (kPairs) pass_cluster_barriers();
    return;
  }
  const Done done = Kernel::attend_tiles(p, part, lengths, shared);
  if constexpr (kPairs) {
    if (done == Done::kEmpty) {
      leave_empty_split<Kernel::kBlockHeads>(p.finish, part, shared);
    } else {
      ptx::bar_sync(0, kRawThreads);
    }
    write_pair<Kernel::kBlockHeads>(p, part, shared, warp);
    return;
  }
  if (done == Done::kWritten) return;
  if (done == Done::kEmpty) {
    if constexpr (Kernel::kEmptyApart) {
      write_empty_apart(p, part, warp, kAttendWarps);
    } else {
      write_empty(p, part, warp, kAttendWarps);
    }
    return;
  }
  ptx::bar_sync(0, kRawThreads);
  if (p.o_accum != nullptr) {
    write_partials(p, part, shared.results[0], kRawResultPitch, shared, warp, kAttendWarps);
  } else {
    write_outputs(p.finish, part, shared.results[0], kRawResultPitch, shared, warp, kAttendWarps);
  }
}

// A block takes one part after the other.
template <typename Kernel>
__global__ void __launch_bounds__(kRawThreads, 1) raw_parts_kernel(const __grid_constant__ RawPartsParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_bytes);
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    Kernel::init_barriers(shared);
    ptx::mbarrier_init_fence();
  }
  const int warp = my_warp();
  __syncthreads();
  if (copies(warp)) {
    ptx::setmaxnreg_dec<Kernel::kCopyRegisters>();
    ptx::griddepcontrol_wait();
    Kernel::copy_parts(p, shared);
  } else if (weighs(warp)) {
    ptx::setmaxnreg_dec<Kernel::kWeighRegisters>();
    ptx::griddepcontrol_wait();
    Kernel::weigh_parts(p.decode, shared);
  } else {
    Kernel::attend_parts(p, warp, shared);
  }
}

// ---- host ----

struct Variant {
  int block_heads;
  bool pairs;
  int threads;
  void (*kernel)(DecodeParams);
  size_t shared_bytes;
};

template <typename Kernel, bool kPairs>
constexpr Variant raw_tiles_variant = {Kernel::kBlockHeads, kPairs, kRawThreads, raw_tiles_kernel<Kernel, kPairs>,
                                       sizeof(typename Kernel::Shared)};

constexpr Variant kVariants[] = {
    raw_tiles_variant<EightHeads<>, false>,
    raw_tiles_variant<EightHeads<>, true>,
    raw_tiles_variant<FewHeads<16>, false>,
    raw_tiles_variant<FewHeads<16>, true>,
    raw_tiles_variant<FewHeads<32>, false>,
    raw_tiles_variant<FewHeads<32>, true>,
    {kTileHeads, false, kTileThreads, sparse_decode_kernel, sizeof(SharedMemory)},
};

// Raises the kernels' shared-memory limits, which also loads them. A graph capture allows it.
cudaError_t raise_shared_memory_limits() {
  return once_a_device([] {
    const auto raise = [](auto* kernel, size_t bytes) {
      return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    };
    cudaError_t err = cudaSuccess;
    for (const Variant& v : kVariants)
      if (err == cudaSuccess) err = raise(v.kernel, v.shared_bytes);
    if (err == cudaSuccess) err = raise(raw_parts_kernel<EightParts>, sizeof(EightPartsMemory));
    if (err == cudaSuccess) err = raise(raw_parts_kernel<FewParts<16>>, sizeof(FewPartsMemory<16>));
    if (err == cudaSuccess) err = raise(raw_parts_kernel<FewParts<32>>, sizeof(FewPartsMemory<32>));
    if (err == cudaSuccess) err = raise(many_parts_kernel<false>, sizeof(PartsMemory));
    if (err == cudaSuccess) err = raise(many_parts_kernel<true>, sizeof(PartsMemory));
    return err;
  });
}

// ---- blocks that take one part after the other ----

// Most parts a block. They are dealt out in turn, whatever their lengths: of rows of 64 heads of which half have 3
// tiles and half 10, 256 take 53.1 us instead of 56.9, and 1000, eight turns, 182 instead of 166. Dealt out by their
// costs, which every block finds anew while its first tile comes, 1000 take 153 and 256 take 56.3: 5 us until that is
// done.
constexpr int kMostTurns = 6;

// Whether such blocks take it, whatever the number of parts.
bool suits_parts(const DecodeParams& p) {
  const CombineParams& f = p.finish;
  const bool aligned =
      p.q_is_aligned &&
      ((reinterpret_cast<uint64_t>(f.out) | static_cast<uint64_t>(f.stride_out_token | f.stride_out_head) * 2) & 15) ==
          0;
  return p.num_whole > 0 && f.output == OutputKind::kBf16 && f.amax == nullptr && aligned;
}

// 64 heads, if the driver has tensor maps. `taken`: it was launched.
cudaError_t launch_many_parts(const DecodeParams& p, uint32_t parts, uint32_t blocks, bool pdl, cudaStream_t stream,
                              bool* taken) {
  const CombineParams& f = p.finish;
  const bool cut = p.num_whole < p.num_tokens;
  const int64_t splits = static_cast<int64_t>(p.groups.divisor) * p.num_splits * (p.num_tokens - p.num_whole);
  if (cut && splits > blocks) return cudaSuccess;
  PartsParams params;
  params.decode = p;
  params.num_parts = parts;
  const auto rows = [&](void* base, int64_t head, int64_t token) {
    return Tensor4{
        base,
        {kBlockChannels, static_cast<cuuint64_t>(p.num_heads), kChannelBlocks, static_cast<cuuint64_t>(p.num_tokens)},
        {static_cast<cuuint64_t>(head) * 2, kRowBytes, static_cast<cuuint64_t>(token) * 2}};
  };
  if (make_tensor_map(&params.q, rows(const_cast<void*>(p.q), p.stride_q_head, p.stride_q_token),
                      {kBlockChannels, kTileHeads, kChannelBlocks, 1}) != cudaSuccess ||
      make_tensor_map(&params.out, rows(f.out, f.stride_out_head, f.stride_out_token),
                      {kBlockChannels, kWarpHeads, kHalfBlocks, 1}) != cudaSuccess)
    return cudaSuccess;
  *taken = true;
  return launch_kernel(cut ? many_parts_kernel<true> : many_parts_kernel<false>, dim3(blocks), dim3(kTileThreads),
                       sizeof(PartsMemory), pdl, stream, params);
}

// By at most as many blocks as there are SMs, of what such blocks take: 64 heads unless a block would have two splits,
// fewer heads if there are more parts than SMs.
cudaError_t launch_parts(const DecodeParams& params, int64_t parts, bool pdl, cudaStream_t stream, bool* taken) {
  if (!suits_parts(params)) return cudaSuccess;
  DeviceFacts facts;
  if (cudaError_t err = device_facts(&facts); err != cudaSuccess) return err;
  if (parts > static_cast<int64_t>(kMostTurns) * facts.sm_count) return cudaSuccess;
  DecodeParams p = params;
  if (p.o_accum != nullptr) {  // to where a row before the first split one would have its partials
    p.o_accum -= p.num_whole * p.stride_o_token;
    p.lse_accum -= p.num_whole * p.stride_lse_token;
  }
  const uint32_t count = static_cast<uint32_t>(parts);
  const uint32_t blocks = std::min(count, static_cast<uint32_t>(facts.sm_count));
  if (p.block_heads == kTileHeads) return launch_many_parts(p, count, blocks, pdl, stream, taken);
  if (parts <= facts.sm_count) return cudaSuccess;
  *taken = true;
  const auto launch = [&](auto roles) {
    using Kernel = decltype(roles);
    return launch_kernel(raw_parts_kernel<Kernel>, dim3(blocks), dim3(kRawThreads), sizeof(typename Kernel::Shared),
                         pdl, stream, RawPartsParams{p, count});
  };
  if (p.block_heads == kEightHeads) return launch(EightParts());
  return p.block_heads == 16 ? launch(FewParts<16>()) : launch(FewParts<32>());
}

// ---- whole rows and split ones ----

const void* positions_of(const void* positions, bool are_int64, int64_t elements) {
  return static_cast<const uint8_t*>(positions) + elements * (are_int64 ? 8 : 4);
}

// The whole rows alone.
DecodeParams whole_rows(DecodeParams p) {
  p.num_tokens = p.num_whole;
  p.num_splits = 1;
  p.o_accum = p.lse_accum = nullptr;
  return p;
}

// The split rows alone.
DecodeParams split_rows(DecodeParams p) {
  const int64_t first = p.num_whole;
  p.num_tokens -= p.num_whole;
  p.num_whole = 0;
  p.finish = {};
  p.q = static_cast<const __nv_bfloat16*>(p.q) + first * p.stride_q_token;
  for (Source& source : p.source) {
    source.indices += first * source.stride_indices;
    if (source.length != nullptr) source.length += first * source.stride_length;
  }
  QueryPrologue& query = p.query;
  if (query.positions != nullptr)
    query.positions = positions_of(query.positions, query.positions_are_int64, first * query.stride_positions_token);
  return p;
}

}  // namespace

cudaError_t launch_sparse_decode(const DecodeParams& params, bool pdl, cudaStream_t stream) {
  DecodeParams p = params;
  if (p.num_tokens == 0) return cudaSuccess;
  const bool any_split = p.num_whole < p.num_tokens, mixed = any_split && p.num_whole > 0;
  const bool pairs = !any_split && p.num_splits == kPair;
  if (p.num_heads < 1 || p.num_splits < 1 || p.num_whole < 0 || p.num_whole > p.num_tokens ||
      any_split != (p.o_accum != nullptr) || (!any_split && p.num_splits > kPair) ||
      (mixed && p.finish.output != OutputKind::kBf16) || ((mixed || pairs) && p.finish.amax != nullptr))
    return cudaErrorInvalidValue;
  if (cudaError_t err = raise_shared_memory_limits(); err != cudaSuccess) return err;
  for (const Variant& v : kVariants) {
    if (v.block_heads != p.block_heads || v.pairs != pairs) continue;
    const int64_t groups = (p.num_heads + v.block_heads - 1) / v.block_heads;
    const int64_t num_split = p.num_tokens - p.num_whole;
    const int64_t blocks = groups * (p.num_whole * (pairs ? kPair : 1) + num_split * p.num_splits);
    if (blocks > INT32_MAX) return cudaErrorInvalidValue;
    p.groups = make_divisor(static_cast<int32_t>(groups));
    p.splits = make_divisor(p.num_splits);
    if (pairs)
      return launch_kernel(v.kernel, dim3(static_cast<uint32_t>(blocks)), dim3(v.threads), v.shared_bytes, pdl, stream,
                           p, kPair);
    bool taken = false;
    if (cudaError_t err = launch_parts(p, blocks, pdl, stream, &taken); taken || err != cudaSuccess) return err;
    if (mixed) {
      if (cudaError_t err = launch_sparse_decode(whole_rows(params), pdl, stream); err != cudaSuccess) return err;
      return launch_sparse_decode(split_rows(params), pdl, stream);
    }
    return launch_kernel(v.kernel, dim3(static_cast<uint32_t>(blocks)), dim3(v.threads), v.shared_bytes, pdl, stream,
                         p);
  }
  return cudaErrorInvalidValue;
}

}  // namespace sgl_dsv4::sm90
