// Merges split-KV partials and runs the epilogue. Contract: decode.h.
//
// One block of 4 warps has one (row, head), a warp 128 of its 512 channels, a thread 4. A warp is then one fp8 group of
// 128, the last 64 channels are the upper half of the last warp, and every O load of a split is one 16-byte load a
// thread: S independent loads in flight. The time at small T is two dependent trips to L2 (LSE, then O; beside them
// position, then frequencies), so nothing else may wait in between: the weights are computed while O is on its way.
#include "common/cache_layout.h"
#include "common/launch.h"
#include "common/ptx.cuh"
#include "decode/decode.h"
#include "decode/epilogue.cuh"
#include "decode/finish.cuh"

namespace sgl_dsv4 {
namespace {

using namespace finish;

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr float kMinusInfinity = -INFINITY;
static_assert(kVec == kHeadDim / kThreads && kWarps == kGroups);

__device__ __forceinline__ Place my_place(const CombineParams& p) {
  const uint32_t heads = static_cast<uint32_t>(p.num_heads);
  const uint32_t token = blockIdx.x / heads;
  const int thread = static_cast<int>(threadIdx.x);
  return {token, blockIdx.x - token * heads, thread / 32, thread % 32, thread * kVec};
}

// ---- merging ----

struct Merged {
  Values<1> value;  // weighted mean of the live splits' O; 0 if there is none
  float lse;        // natural log; +inf if there is no live split
  bool empty;       // no live split
};

__device__ __forceinline__ bool is_live(float lse) {
  return lse != kMinusInfinity;
}  // a NaN is live

// The LSE of a split that there is not. A dry run has live ones.
__device__ __forceinline__ float no_lse(const Place& place) {
  return place.dry ? 0.0f : kMinusInfinity;
}

// Weight of a split relative to the largest LSE `most`. Only asked for in rows with a live split, so a dead split never
// meets -inf - -inf beside finite LSEs: its weight is 2^-inf = 0.
__device__ __forceinline__ float weight(float lse, float most) {
  return ptx::ex2(lse - most);
}

__device__ __forceinline__ void accumulate(float (&sum)[kVec], float w, const float4& o) {
  sum[0] = fmaf(w, o.x, sum[0]);
  sum[1] = fmaf(w, o.y, sum[1]);
  sum[2] = fmaf(w, o.z, sum[2]);
  sum[3] = fmaf(w, o.w, sum[3]);
}

// At most kSplits splits: every thread holds every LSE, and all of O is in flight at once.
template <int kSplits>
struct SplitMerger {
  float lse[kSplits];

  __device__ __forceinline__ void load_lse(const float* lse_accum, const Place& place, const CombineParams& p) {
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      lse[s] = ptx::ld_global_if(!place.dry && s < p.num_splits, lse_accum, no_lse(place));
      lse_accum += p.stride_lse_accum_split;
    }
  }

  __device__ __forceinline__ Merged merge(const float* o, const float*, const Place& place,
                                          const CombineParams& p) const {
    // All loads of O.
    float4 part[kSplits];
    bool live = false;
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      part[s] = ptx::ld_global_cs_v4_if(!place.dry && is_live(lse[s]), o);
      o += p.stride_o_accum_split;
      live |= is_live(lse[s]);
    }
    Merged m = {{}, INFINITY, !live};
    if (!live) return m;

    // Weights.
    float most = lse[0];
#pragma unroll
    for (int s = 1; s < kSplits; ++s) most = fmaxf(most, lse[s]);
    float w[kSplits];
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      w[s] = weight(lse[s], most);
      sum += w[s];
    }
    const float inverse = 1.0f / sum;
    m.lse = natural_lse(most, sum);

    // Weights that sum to 1 keep the sum of products in range, and a lone live split exact.
#pragma unroll
    for (int s = 0; s < kSplits; ++s) accumulate(m.value[0], w[s] * inverse, part[s]);
    return m;
  }
};

// Any number of splits (kSplits = 0): lane l holds the LSEs of splits l, 32 + l, ... in turn, and only live splits are
// visited, kBatch loads in flight at a time.
template <>
struct SplitMerger<0> {
  static constexpr int kBatch = 8;
  float first_lse;  // of split `lane`

  __device__ __forceinline__ static float lane_lse(const float* lse_accum, int split, const Place& place,
                                                   const CombineParams& p) {
    return ptx::ld_global_if(!place.dry && split < p.num_splits, lse_accum + split * p.stride_lse_accum_split,
                             no_lse(place));
  }

  __device__ __forceinline__ void load_lse(const float* lse_accum, const Place& place, const CombineParams& p) {
    first_lse = lane_lse(lse_accum, place.lane, place, p);
  }

  __device__ __forceinline__ Merged merge(const float* o, const float* lse_accum, const Place& place,
                                          const CombineParams& p) const {
    const int lane = place.lane;
    // Maximum and sum over all splits; LSEs past the first 32 are read again from cache.
    float most = first_lse;
    bool live = is_live(first_lse);
    for (int base = 32; base < p.num_splits; base += 32) {
      const float lse = lane_lse(lse_accum, base + lane, place, p);
      most = fmaxf(most, lse);
      live |= is_live(lse);
    }
    live = __any_sync(kAllLanes, live);
    Merged m = {{}, INFINITY, !live};
    if (!live) return m;
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, bit));
    float sum = weight(first_lse, most);
    for (int base = 32; base < p.num_splits; base += 32)
      sum += weight(lane_lse(lse_accum, base + lane, place, p), most);
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(kAllLanes, sum, bit);
    const float inverse = 1.0f / sum;
    m.lse = natural_lse(most, sum);

    // O, 32 splits a round.
    for (int base = 0; base < p.num_splits; base += 32) {
      const float lse = base == 0 ? first_lse : lane_lse(lse_accum, base + lane, place, p);
      const float w = weight(lse, most) * inverse;
      for (uint32_t todo = __ballot_sync(kAllLanes, is_live(lse)); todo != 0;) {
        float4 part[kBatch];
        float part_weight[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int source = todo != 0 ? __ffs(static_cast<int>(todo)) - 1 : 0;
          part[i] = ptx::ld_global_cs_v4_if(!place.dry && todo != 0, o + (base + source) * p.stride_o_accum_split);
          const float source_weight = __shfl_sync(kAllLanes, w, source);
          part_weight[i] = todo != 0 ? source_weight : 0.0f;
          todo &= todo - 1;
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) accumulate(m.value[0], part_weight[i], part[i]);
      }
    }
    return m;
  }
};

// ---- outputs ----

// amax over the 512 channels: the only place where the four warps meet.
__device__ __forceinline__ void store_amax(const float (&x)[kVec], const Place& place, const CombineParams& p) {
  __shared__ uint32_t warp_amax[kWarps];
  const uint32_t mine = epilogue::lanes_max<32>(epilogue::abs_max_bits(x));
  if (place.lane == 0) warp_amax[place.group] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint32_t amax = warp_amax[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) amax = max(amax, warp_amax[w]);
  p.amax[place.token * p.stride_amax_token + place.head * p.stride_amax_head] = __uint_as_float(amax);
}

// ---- the kernel ----

template <int kSplits>
__device__ __forceinline__ void combine(const Place& place, const float* lse_accum, const float* o,
                                        const CombineParams& p) {
  // First trip: sink, position and LSEs. Second: frequencies and O.
  const bool has_sink = !place.dry && p.attn_sink != nullptr;
  const float sink = ptx::ld_global_if(has_sink, p.attn_sink + place.head, kMinusInfinity);
  const int64_t position = load_position(place, p);
  SplitMerger<kSplits> merger;
  merger.load_lse(lse_accum, place, p);
  const Rotation rotation = load_rotation(place, position, p);
  Merged m = merger.merge(o, lse_accum, place, p);

  if (!m.empty) apply_sink_and_rope(m.value[0], epilogue::sink_factor(sink, m.lse), rotation, place, p);
  store_output<1>(m.value, place, p);
  if (place.dry) return;
  if (threadIdx.x == 0) p.lse[place.token * p.stride_lse_token + place.head * p.stride_lse_head] = m.lse;
  if (p.amax != nullptr) store_amax(m.value[0], place, p);
}

// Blocks that start while the decode still runs go through the code once without touching memory, not even the sink's:
// the decode lets this grid start while the kernel before the decode may still run. That brings instructions and
// constants into the caches, from where the kernels between two layers of a model drive them out. A small grid starts
// as a whole, on SMs that the decode leaves free; of a large one only so many blocks, which warm the L2 for the others.
// Microseconds from the decode's end among such kernels (traces as benchmark/among.py makes them) on an H200, 64 heads:
// 1 row 1.5 instead of 4.2, 8 rows 2.1 (2.8), 32 rows 3.8 (4.3). Touching the parameters alone, and decode kernels of
// 96 instead of 128 registers a thread, which leave room for combine blocks, gained nothing.
constexpr uint32_t kSmallGrid = 264;  // two blocks an SM of an H200
constexpr uint32_t kDryBlocksOfLargeGrid = 32;

// Blocks that an SM holds at least: what registers are limited by, as far as nothing spills.
constexpr int blocks_per_sm(int splits) {
  if (splits > 14) return 3;
  if (splits == 0 || splits > 10) return 4;
  if (splits > 8) return 6;
  return splits == 8 ? 7 : 8;
}

template <int kSplits>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(kSplits))
    combine_kernel(const __grid_constant__ CombineParams p) {
  ptx::griddepcontrol_launch_dependents();
  Place place = my_place(p);
  const float* lse_accum = p.lse_accum + place.token * p.stride_lse_accum_token + place.head * p.stride_lse_accum_head;
  const float* o =
      p.o_accum + place.token * p.stride_o_accum_token + place.head * p.stride_o_accum_head + place.channel;

  const uint32_t dry_blocks = gridDim.x <= kSmallGrid ? kSmallGrid : kDryBlocksOfLargeGrid;
  int dry_runs = ptx::kHasGriddepcontrol && p.starts_early && blockIdx.x < dry_blocks;
#pragma unroll 1
  do {
    ptx::keep(dry_runs);  // both runs share their code
    place.dry = dry_runs > 0;
    if (!place.dry) ptx::griddepcontrol_wait();
    combine<kSplits>(place, lse_accum, o, p);
  } while (dry_runs-- > 0);
}

// The smallest kernel that holds `num_splits` is launched; which one depends on the number of splits alone, and so do a
// row's bits. 10 and 18 are the tiles of 128 + 512 and of 128 + 1024 keys.
struct Variant {
  int most_splits;
  void (*kernel)(CombineParams);
};

constexpr Variant kVariants[] = {
    {1, combine_kernel<1>},   {2, combine_kernel<2>},   {4, combine_kernel<4>},         {5, combine_kernel<5>},
    {6, combine_kernel<6>},   {8, combine_kernel<8>},   {10, combine_kernel<10>},       {14, combine_kernel<14>},
    {18, combine_kernel<18>}, {24, combine_kernel<24>}, {INT32_MAX, combine_kernel<0>},
};

cudaError_t load_kernels() {
  return once_a_device([] {
    for (const Variant& v : kVariants)
      if (cudaError_t err = load_code(v.kernel); err != cudaSuccess) return err;
    return cudaSuccess;
  });
}

}  // namespace

cudaError_t launch_combine(const CombineParams& params, bool pdl, cudaStream_t stream) {
  if (params.num_tokens == 0 || params.num_heads == 0) return cudaSuccess;
  if (params.num_splits < 1 || params.num_tokens > INT32_MAX / params.num_heads) return cudaErrorInvalidValue;
  if (cudaError_t err = load_kernels(); err != cudaSuccess) return err;
  CombineParams p = params;
  p.starts_early = pdl;
  const Variant* v = kVariants;
  while (v->most_splits < p.num_splits) ++v;
  return launch_kernel(v->kernel, dim3(p.num_tokens * p.num_heads), dim3(kThreads), 0, pdl, stream, p);
}

}  // namespace sgl_dsv4
