// The attending warpgroups at 64 heads: S = Q K^T, online softmax in log2, O += P V.
//
// Both have the 64 heads as rows, and half of the channels of O each. Warpgroup w computes the scores of every other
// tile, those in stage w, and turns them into weights. Its own weights it has in registers, as the operand of its
// products; the other warpgroup gets them through shared memory, with what they are measured against, thread by thread:
// both have the same places in a tile. So the scores of one tile are computed while those of the last one become
// weights.
//
// Products stay in flight from P V of the other's tile to the scores of the next: waiting in between costs 5 %, and so
// does issuing the first half of the scores before P V.
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
inline constexpr int kWeightRegs = kScoreRegs / 2;

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

// Starts half of the channels of a tile's scores, once these are there.
__device__ __forceinline__ void compute_scores(float (&s)[kScoreRegs], TileMemory& shared, int stage, int half,
                                               uint32_t parity) {
  const uint64_t q = operand_descriptor(ptx::shared_address(shared.q));
  const uint64_t keys = operand_descriptor(ptx::shared_address(shared.keys[stage]));
  ptx::mbarrier_wait(ptx::shared_address(&shared.barriers.full[stage][half]), parity);
  ptx::fence_proxy_async();
  if (half == 0) {
    wgmma_begin(s);
  } else {
    wgmma_fence();
  }
#pragma unroll
  for (int block = half * kHalfBlocks; block < (half + 1) * kHalfBlocks; ++block) {
#pragma unroll
    for (int k = 0; k < kBlockChannels / 16; ++k) {
      const uint64_t step = descriptor_step(block * kBlockBytes + k * 32);
      wgmma_m64n64k16(s, q + step, keys + step, block + k > 0);
    }
  }
  wgmma_commit();
}

// The softmax scale is left to the fma that weights begin with, where that does not matter. All return what the scores
// are still to be multiplied by.
__device__ __forceinline__ float scale_now(float (&s)[kScoreRegs], float scale) {
#pragma unroll
  for (int i = 0; i < kScoreRegs; ++i) s[i] *= scale;
  return 1.0f;
}

// A scale that is not positive changes which score is the largest.
__device__ __forceinline__ float scale_before_maximum(float (&s)[kScoreRegs], float scale) {
  return scale > 0.0f ? scale : scale_now(s, scale);
}

// The fma does not round its product, but the unit is a rounded one: the largest weight is 1 within 2^-8 for units up
// to 2^16, and lost for some of 2^31. And a product that overflows is NaN, infinity minus infinity, only if it is
// rounded.
__device__ __forceinline__ float scale_before_weights(float (&s)[kScoreRegs], float scale, const Measured& measured) {
  const float most = fmaxf(fabsf(base_of(measured.unit[0])), fabsf(base_of(measured.unit[1])));
  return most <= 0x1p16f ? scale : scale_now(s, scale);
}

// Of a thread's two rows.
struct Softmax {
  Measured last = {{kMinusInfinity, kMinusInfinity}, {kMinusInfinity, kMinusInfinity}};
  float total[2] = {0.0f, 0.0f};  // this thread's share of the sums of weights, of its warpgroup's tiles

  // Scores of keys that are not attended become -inf, whatever stands there. Moves on to the unit of their tile and
  // returns what earlier sums of the two rows are multiplied by.
  __device__ __forceinline__ float2 measure(float (&s)[kScoreRegs], const uint32_t* attended, int column, float scale) {
    const uint4 low = reinterpret_cast<const uint4*>(attended)[0], high = reinterpret_cast<const uint4*>(attended)[1];
    const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const bool whole = (low.x & low.y & low.z & low.w & high.x & high.y & high.z & high.w) == 0xffffffffu;
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
      decay[r] = next_unit(row_max(tile_most) * scale, last.top[r], last.unit[r]);
      total[r] *= decay[r];
    }
    return make_float2(decay[0], decay[1]);
  }

  // The same for a tile that the other warpgroup has measured.
  __device__ __forceinline__ float2 follow(const Measured& next) {
    float decay[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      decay[r] = decay_to(last.unit[r], next.unit[r]);
      total[r] *= decay[r];
    }
    last = next;
    return make_float2(decay[0], decay[1]);
  }

  // Scores -> weights, as an operand in registers (wgmma.cuh).
  __device__ __forceinline__ void weigh(const float (&s)[kScoreRegs], float scale, uint32_t (&weights)[kWeightRegs]) {
    const float base[2] = {base_of(last.unit[0]), base_of(last.unit[1])};
#pragma unroll
    for (int i = 0; i < kWeightRegs; ++i) {
      const int r = i % 2;
      const float x = ptx::ex2(fmaf(s[2 * i], scale, -base[r])), y = ptx::ex2(fmaf(s[2 * i + 1], scale, -base[r]));
      total[r] += x + y;
      weights[i] = ptx::cvt_bf16x2(x, y);
    }
  }
};

// A warpgroup's weights in shared memory, of every thread those that the same thread of the other one needs. They are
// read before the next ones, which that thread makes itself, replace them.
inline constexpr int kWeightVectors = kWeightRegs / 4;
inline constexpr int kWeightStep = kWarpgroupThreads * 16;
static_assert(kWeightVectors * kWeightStep == kBlockBytes);

__device__ __forceinline__ uint32_t weights_place(const TileMemory& shared, int thread) {
  return ptx::shared_address(shared.weights) + static_cast<uint32_t>(thread) % kWarpgroupThreads * 16;
}

__device__ __forceinline__ void store_weights(const uint32_t (&weights)[kWeightRegs], uint32_t at) {
#pragma unroll
  for (int i = 0; i < kWeightVectors; ++i)
    ptx::st_shared(at + i * kWeightStep,
                   make_uint4(weights[4 * i], weights[4 * i + 1], weights[4 * i + 2], weights[4 * i + 3]));
}

__device__ __forceinline__ void load_weights(uint32_t (&weights)[kWeightRegs], uint32_t at) {
#pragma unroll
  for (int i = 0; i < kWeightVectors; ++i) {
    const uint4 v = ptx::ld_shared(at + i * kWeightStep);
    weights[4 * i] = v.x;
    weights[4 * i + 1] = v.y;
    weights[4 * i + 2] = v.z;
    weights[4 * i + 3] = v.w;
  }
}

// ---- values ----

// Half of the channels of O, as two products' accumulators.
using Half = float[2][kQuarterRegs];

__device__ __forceinline__ void decay_values(Half& o, float2 decay) {
#pragma unroll
  for (int i = 0; i < kQuarterRegs; ++i) {
    o[0][i] *= i / 2 % 2 == 0 ? decay.x : decay.y;
    o[1][i] *= i / 2 % 2 == 0 ? decay.x : decay.y;
  }
}

// Starts O += P V. `values`: the descriptor of this warpgroup's channels of the tile, 64 keys.
__device__ __forceinline__ void add_values(Half& o, uint32_t (&weights)[kWeightRegs], uint64_t values) {
  pin(o[0]);
  pin(weights);
  wgmma_begin(o[1]);
#pragma unroll
  for (int q = 0; q < 2; ++q) {
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k)
      wgmma_m64n128k16(
          o[q], weights + 4 * k,
          values + descriptor_step(q * (kQuarterChannels / kBlockChannels) * kBlockBytes + k * 2 * kGroupBytes));
  }
  wgmma_commit();
}

// Waits for the products but for the last kLater groups.
template <int kLater>
__device__ __forceinline__ void added(Half& o, uint32_t (&weights)[kWeightRegs]) {
  wgmma_wait<kLater>(o[0]);
  pin(o[1]);
  pin(weights);
}

// ---- a tile ----

// Of one warpgroup: which half of the channels it has, and the places of its threads.
struct Attending {
  TileMemory& shared;
  int half, there;
  Place place;
  uint32_t weights_at;

  __device__ __forceinline__ Attending(TileMemory& shared, int half, int thread)
      : shared(shared),
        half(half),
        there(1 - half),
        place(place_of(thread)),
        weights_at(weights_place(shared, thread)) {}

  __device__ __forceinline__ uint64_t values(int stage) const {
    return operand_descriptor(ptx::shared_address(shared.keys[stage]) + half * kHalfBlocks * kBlockBytes);
  }

  // Of the other's stage, whose tile comes before this one's in a round.
  __device__ __forceinline__ uint32_t parity_there(uint32_t parity) const {
    return parity ^ static_cast<uint32_t>(there == 1);
  }

  // The other warpgroup's tile has been measured.
  __device__ __forceinline__ void follow_other(Half& o, Softmax& softmax, uint32_t parity) const {
    ptx::mbarrier_wait(ptx::shared_address(&shared.barriers.measured[there]), parity);
    decay_values(o, softmax.follow(shared.measured[there][place.pair()]));
  }

  // Starts O += P V of it.
  __device__ __forceinline__ void add_other(Half& o, uint32_t (&weights)[kWeightRegs], uint32_t parity) const {
    ptx::mbarrier_wait(ptx::shared_address(&shared.barriers.weighed[there]), parity);
    load_weights(weights, weights_at);
    ptx::fence_proxy_async();  // the tile is there, or it would not have been scored
    add_values(o, weights, values(there));
  }

  // The scores of its own tile. `behind`: behind the products of the other's, whose end is waited for on the way.
  // `meanwhile`: done once the first half of them is under way.
  template <typename Meanwhile>
  __device__ __forceinline__ void score_own(float (&s)[kScoreRegs], Half& o, uint32_t (&weights)[kWeightRegs],
                                            bool behind, uint32_t parity, const Meanwhile& meanwhile) const {
    compute_scores(s, shared, half, 0, parity);
    if (behind) {
      added<1>(o, weights);
      release(there);
    }
    meanwhile();
    compute_scores(s, shared, half, 1, parity);
    wgmma_wait<0>(s);
  }

  // Its own tile, whose scores are there: weights, for both. Returns what O is to be multiplied by.
  __device__ __forceinline__ float2 weigh(uint32_t (&weights)[kWeightRegs], Softmax& softmax, float (&s)[kScoreRegs],
                                          float scale_log2) const {
    const float scale = scale_before_maximum(s, scale_log2);
    const float2 decay = softmax.measure(s, shared.attended[half], place.column, scale);
    if (place.column == 0) shared.measured[half][place.pair()] = softmax.last;
    ptx::mbarrier_arrive(ptx::shared_address(&shared.barriers.measured[half]));
    softmax.weigh(s, scale_before_weights(s, scale, softmax.last), weights);
    store_weights(weights, weights_at);
    ptx::mbarrier_arrive(ptx::shared_address(&shared.barriers.weighed[half]));
    return decay;
  }

  // Starts O += P V of it.
  __device__ __forceinline__ void add_own(Half& o, uint32_t (&weights)[kWeightRegs], float2 decay) const {
    decay_values(o, decay);
    add_values(o, weights, values(half));
  }

  // This warpgroup's products with a tile are done.
  __device__ __forceinline__ void release(int stage) const {
    ptx::mbarrier_arrive(ptx::shared_address(&shared.barriers.empty[stage][half]));
  }
};

// This warpgroup's half of O into shared memory, where the keys were.
__device__ __forceinline__ void stage_results(const Half& o, const Place& place, int half, uint32_t results) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t row = results + ((place.row + 8 * r) * kResultPitch + half * kHalfChannels + place.column) * 4;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
#pragma unroll
      for (int j = 0; j < kQuarterChannels / 8; ++j)
        ptx::st_shared(row + (q * kQuarterChannels + 8 * j) * 4, o[q][4 * j + 2 * r], o[q][4 * j + 2 * r + 1]);
    }
  }
}

// ---- the role ----

// Leaves in shared memory the results and what they are to be multiplied by, and writes the LSEs. `half`: which
// warpgroup this is, and which half of the channels it has.
__device__ __forceinline__ void attend(const DecodeParams& p, const Work& w, int half, SharedMemory& shared) {
  const Attending me(shared, half, static_cast<int>(threadIdx.x));
  const Place& place = me.place;
  if (half == 1 && p.o_accum == nullptr)
    load_rotation(p.finish, w, static_cast<int>(threadIdx.x) % kWarpgroupThreads, shared.rotation);

  const int tiles = w.range.end - w.range.begin;
  Half o = {};  // the first tile's decay is 0, and 0 times what a register held may be NaN
  Softmax softmax;
  // A round has the other warpgroup's tile, which warpgroup 0 has none of at first, and the next one, its own, which
  // one of them has none of at last. `parity`: of its own stage.
  uint32_t parity = 0;
#pragma unroll 1
  for (int own = half; own <= tiles; own += 2) {
    uint32_t weights[kWeightRegs];
    if (own > 0) {
      me.follow_other(o, softmax, me.parity_there(parity));
      me.add_other(o, weights, me.parity_there(parity));
    }
    if (own < tiles) {
      float s[kScoreRegs] = {};
      me.score_own(s, o, weights, own > 0, parity, [] {});
      me.add_own(o, weights, me.weigh(weights, softmax, s, p.scale_log2));
    }
    added<0>(o, weights);
    if (own < tiles) me.release(half);
    parity ^= 1;
  }

  const float total[2] = {row_sum(softmax.total[0]), row_sum(softmax.total[1])};
  if (half == 1 && place.column == 0) {
    shared.total[place.row] = total[0];
    shared.total[place.row + 8] = total[1];
  }
  consumers_meet();  // keys and weights are no longer needed, the totals are there
  if (half == 0 && place.column == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = place.row + 8 * r;
      finish_head(p, w, ends_of(p.o_accum != nullptr), head, softmax.last.unit[r], total[r] + shared.total[head],
                  load_sink(p, w, head), shared);
    }
  }
  stage_results(o, place, half, ptx::shared_address(shared.keys));
}

}  // namespace sgl_dsv4::sm90
