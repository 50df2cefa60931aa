// The consuming warpgroups: S = Q K^T, online softmax in log2, O += P V.
//
// Both have all 64 heads as rows. Warpgroup 0 computes the scores of a tile (64 x 64), turns them into weights and puts
// these, as bf16, and the rows' decay into shared memory; then each adds its half of the channels to its half of O.
// P and decay have two buffers: what is written for tile i + 2 replaces what both have read for tile i before they met
// for tile i + 1.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ptx.cuh"
#include "decode/sm90/consume.cuh"
#include "decode/sm90/output.cuh"
#include "decode/sm90/wgmma.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

inline constexpr int kScoreRegs = kTileKeys / 2;
inline constexpr int kHalfChannels = kHeadDim / 2;
inline constexpr int kQuarterChannels = kHeadDim / 4;
inline constexpr int kQuarterRegs = kQuarterChannels / 2;

// Maximum or sum over the four lanes that share a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// ---- scores and weights ----

// S of one tile.
__device__ __forceinline__ void compute_scores(float (&s)[kScoreRegs], SharedMemory& shared, int stage) {
  const uint64_t q = operand(ptx::shared_address(shared.q));
  const uint64_t keys = operand(ptx::shared_address(shared.keys[stage]));
  wgmma_begin(s);
#pragma unroll
  for (int block = 0; block < kChannelBlocks; ++block) {
#pragma unroll
    for (int k = 0; k < kBlockChannels / 16; ++k) {
      const uint64_t step = descriptor_step(block * kBlockBytes + k * 32);
      wgmma_m64n64k16(s, q + step, keys + step, block + k > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>(s);
}

// Of a thread's two rows, in log2: the largest score, the unit of the last tile, and this thread's share of the sum.
struct Softmax {
  float top[2] = {kMinusInfinity, kMinusInfinity};
  float unit[2] = {kMinusInfinity, kMinusInfinity};
  float total[2] = {0.0f, 0.0f};

  // Scores -> weights, in place. Returns what earlier sums of the two rows are multiplied by.
  __device__ __forceinline__ float2 update(float (&s)[kScoreRegs], const uint32_t* attended, int column, float scale) {
    // Scale; keys that are not attended get -inf, whatever stands there.
    const uint4 low = reinterpret_cast<const uint4*>(attended)[0], high = reinterpret_cast<const uint4*>(attended)[1];
    const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const bool whole = (low.x & low.y & low.z & low.w & high.x & high.y & high.z & high.w) == 0xffffffffu;
#pragma unroll
    for (int i = 0; i < kScoreRegs; ++i) s[i] *= scale;
    if (!whole) {
#pragma unroll
      for (int i = 0; i < kScoreRegs; ++i)
        if ((words[i / 4] >> (4 * column + i % 2 * 4) & 1u) == 0) s[i] = kMinusInfinity;
    }

    float decay[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tile_most = s[2 * r];
#pragma unroll
      for (int i = 0; i < kScoreRegs; ++i)
        if (i / 2 % 2 == r) tile_most = fmaxf(tile_most, s[i]);
      tile_most = row_max(tile_most);
      top[r] = fmaxf(top[r], tile_most);
      const float now = fmaxf(tile_most, top[r] - kUnitRange);
      const float base = now == kMinusInfinity ? 0.0f : now;  // -inf - -inf would be NaN
      decay[r] = ptx::ex2(unit[r] - base);
      unit[r] = now;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kScoreRegs; ++i) {
        if (i / 2 % 2 != r) continue;
        s[i] = ptx::ex2(s[i] - base);
        sum += s[i];
      }
      total[r] = fmaf(total[r], decay[r], sum);
    }
    return make_float2(decay[0], decay[1]);
  }
};

__device__ __forceinline__ void store_weights(const float (&s)[kScoreRegs], float2 decay, const Place& place,
                                              SharedMemory& shared, int stage) {
  const uint32_t weights = ptx::shared_address(shared.weights[stage]);
#pragma unroll
  for (int j = 0; j < kTileKeys / 8; ++j) {
    const uint32_t at = weights + tile_offset(place.row, 8 * j) + place.column * 2;
    ptx::st_shared(at, ptx::cvt_bf16x2(s[4 * j], s[4 * j + 1]));
    ptx::st_shared(at + kGroupBytes, ptx::cvt_bf16x2(s[4 * j + 2], s[4 * j + 3]));
  }
  if (place.column == 0) {
    shared.decay[stage][place.row] = decay.x;
    shared.decay[stage][place.row + 8] = decay.y;
  }
  ptx::fence_proxy_async();
}

// ---- values ----

// Half of the channels of O, as two products' accumulators.
struct Half {
  float quarter[2][kQuarterRegs];
};

// O = O * decay + P V for half of the channels.
template <int kHalf>
__device__ __forceinline__ void add_values(Half& o, const Place& place, SharedMemory& shared, int stage, bool first) {
  const float2 decay = make_float2(shared.decay[stage][place.row], shared.decay[stage][place.row + 8]);
  if (!first) {
#pragma unroll
    for (int i = 0; i < kQuarterRegs; ++i) {
      const float factor = i / 2 % 2 == 0 ? decay.x : decay.y;
      o.quarter[0][i] *= factor;
      o.quarter[1][i] *= factor;
    }
  }
  const uint64_t weights = operand(ptx::shared_address(shared.weights[stage]));
  const uint64_t values = operand(ptx::shared_address(shared.keys[stage]));
  wgmma_begin(o.quarter[0]);
  wgmma_begin(o.quarter[1]);
#pragma unroll
  for (int q = 0; q < 2; ++q) {
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k) {
      const int block = (2 * kHalf + q) * (kQuarterChannels / kBlockChannels);
      wgmma_m64n128k16(o.quarter[q], weights + descriptor_step(k * 32),
                       values + descriptor_step(block * kBlockBytes + k * 2 * kGroupBytes), !first || k > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>(o.quarter[0]);
  pin(o.quarter[1]);
}

// This warpgroup's half of O into shared memory, where the keys were.
template <int kHalf>
__device__ __forceinline__ void stage_results(const Half& o, const Place& place, uint32_t results) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t row = results + ((place.row + 8 * r) * kResultPitch + kHalf * kHalfChannels + place.column) * 4;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
#pragma unroll
      for (int j = 0; j < kQuarterChannels / 8; ++j)
        ptx::st_shared(row + (q * kQuarterChannels + 8 * j) * 4, o.quarter[q][4 * j + 2 * r],
                       o.quarter[q][4 * j + 2 * r + 1]);
    }
  }
}

// ---- the two roles ----

// Leaves the results, of this warpgroup's half of the channels, in shared memory.
template <int kHalf>
__device__ __forceinline__ void attend(const DecodeParams& p, const Work& w, SharedMemory& shared) {
  const Place place = my_place();
  const bool elected = threadIdx.x % 32 == 0;
  const query::Factors factors = load_q<kTileHeads>(p, w, ptx::shared_address(shared.q));
  finish_q<kTileHeads>(p, w, ptx::shared_address(shared.q), factors);
  ptx::fence_proxy_async();
  consumers_meet();
  // Here, because this warpgroup has nothing to do until the first tile's weights are there.
  if (kHalf == 1 && p.o_accum == nullptr)
    load_epilogue_inputs(p.finish, w, static_cast<int>(threadIdx.x) - kWarpgroupThreads, shared.sink, shared.rotation);

  Softmax softmax;
  Half o = {};
  float s[kScoreRegs] = {};
  int stage = 0;
  uint32_t phase = 0;
  for (int tile = w.range.begin; tile < w.range.end; ++tile) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage]), phase);
    if constexpr (kHalf == 0) {
      compute_scores(s, shared, stage);
      const float2 decay = softmax.update(s, shared.attended[stage], place.column, p.scale_log2);
      store_weights(s, decay, place, shared, stage);  // as many buffers of P as stages
    }
    consumers_meet();
    add_values<kHalf>(o, place, shared, stage, tile == w.range.begin);
    __syncwarp();
    if (elected) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage]));
    stage ^= 1;
    phase ^= stage == 0;
  }

  if constexpr (kHalf == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = row_sum(softmax.total[r]);
      if (place.column != 0) continue;
      shared.unit[place.row + 8 * r] = softmax.unit[r];
      shared.total[place.row + 8 * r] = total;
    }
  }
  consumers_meet();  // the keys are no longer needed
  stage_results<kHalf>(o, place, ptx::shared_address(shared.keys));
}

}  // namespace sgl_dsv4::sm90
