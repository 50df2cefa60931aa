// The consuming warpgroups at 64 heads: S = Q K^T, online softmax in log2, O += P V.
//
// All have the 64 heads as rows. Warpgroup 0 computes the scores of a tile (64 x 64), turns them into weights and puts
// these, as bf16, and the rows' decay into shared memory. Two value warpgroups each have half of the channels: they
// multiply O by the decay while the weights are being computed, then add P V; meanwhile the next scores are being
// computed.
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

// S of one tile, half of the channels after the other.
__device__ __forceinline__ void compute_scores(float (&s)[kScoreRegs], SharedMemory& shared, int stage,
                                               uint32_t phase) {
  const uint64_t q = operand_descriptor(ptx::shared_address(shared.q));
  const uint64_t keys = operand_descriptor(ptx::shared_address(shared.keys[stage]));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.barriers.full[stage][half]), phase);
    ptx::fence_proxy_async();
    if (half == 0) wgmma_begin(s);
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
  wgmma_wait<0>(s);
}

// Of a thread's two rows, in log2: the largest score, the unit of the last tile, and this thread's share of the sum.
struct Softmax {
  float top[2] = {kMinusInfinity, kMinusInfinity};
  float unit[2] = {kMinusInfinity, kMinusInfinity};
  float total[2] = {0.0f, 0.0f};

  // Scales the scores; those of keys that are not attended become -inf, whatever stands there. Moves on to the unit of
  // their tile and returns what earlier sums of the two rows are multiplied by.
  __device__ __forceinline__ float2 measure(float (&s)[kScoreRegs], const uint32_t* attended, int column, float scale) {
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
      decay[r] = next_unit(row_max(tile_most), top[r], unit[r]);
    }
    return make_float2(decay[0], decay[1]);
  }

  // Scores -> weights, in place.
  __device__ __forceinline__ void weigh(float (&s)[kScoreRegs], float2 decay) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float base = base_of(unit[r]);
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kScoreRegs; ++i) {
        if (i / 2 % 2 != r) continue;
        s[i] = ptx::ex2(s[i] - base);
        sum += s[i];
      }
      total[r] = fmaf(total[r], r == 0 ? decay.x : decay.y, sum);
    }
  }
};

__device__ __forceinline__ void store_weights(const float (&s)[kScoreRegs], const Place& place, SharedMemory& shared) {
  const uint32_t weights = ptx::shared_address(shared.weights);
#pragma unroll
  for (int j = 0; j < kTileKeys / 8; ++j) {
    const uint32_t at = weights + tile_offset(place.row, 8 * j) + place.column * 2;
    ptx::st_shared(at, ptx::cvt_bf16x2(s[4 * j], s[4 * j + 1]));
    ptx::st_shared(at + kGroupBytes, ptx::cvt_bf16x2(s[4 * j + 2], s[4 * j + 3]));
  }
}

// ---- values ----

// Half of the channels of O, as two products' accumulators. (One product of 256 channels would read P once instead of
// twice, but has more registers than the assembler allows a block of this many threads.)
using Half = float[2][kQuarterRegs];

// O += P V for half of the channels.
template <int kHalf>
__device__ __forceinline__ void add_values(Half& o, SharedMemory& shared, int stage) {
  const uint64_t weights = operand_descriptor(ptx::shared_address(shared.weights));
  const uint64_t values = operand_descriptor(ptx::shared_address(shared.keys[stage]));
  pin(o[0]);
  wgmma_begin(o[1]);
#pragma unroll
  for (int q = 0; q < 2; ++q) {
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k) {
      const int block = (2 * kHalf + q) * (kQuarterChannels / kBlockChannels);
      wgmma_m64n128k16(o[q], weights + descriptor_step(k * 32),
                       values + descriptor_step(block * kBlockBytes + k * 2 * kGroupBytes), true);
    }
  }
  wgmma_commit();
  wgmma_wait<0>(o[0]);
  pin(o[1]);
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
        ptx::st_shared(row + (q * kQuarterChannels + 8 * j) * 4, o[q][4 * j + 2 * r], o[q][4 * j + 2 * r + 1]);
    }
  }
}

// ---- the roles ----

// Writes the LSEs and leaves in shared memory what the values are to be multiplied by.
__device__ __forceinline__ void attend_scores(const DecodeParams& p, const Work& w, SharedMemory& shared) {
  const Place place = my_place();
  Barriers& barriers = shared.barriers;
  Softmax softmax;
  int stage = 0;
  uint32_t phase = 0;
  for (int tile = w.range.begin; tile < w.range.end; ++tile) {
    float s[kScoreRegs] = {};
    compute_scores(s, shared, stage, phase);

    // This buffer's last decay was read before the weights of the tile between were free.
    const float2 decay = softmax.measure(s, shared.attended[stage], place.column, p.scale_log2);
    if (place.column == 0) {
      shared.decay[stage][place.row] = decay.x;
      shared.decay[stage][place.row + 8] = decay.y;
    }
    ptx::mbarrier_arrive(ptx::shared_address(&barriers.decay_full[stage]));

    softmax.weigh(s, decay);
    ptx::mbarrier_wait(ptx::shared_address(&barriers.weights_empty), stage ^ 1);
    store_weights(s, place, shared);
    ptx::mbarrier_arrive(ptx::shared_address(&barriers.weights_full));
    stage ^= 1;
    phase ^= stage == 0;
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = row_sum(softmax.total[r]);
    if (place.column != 0) continue;
    const int head = place.row + 8 * r;
    finish_head(p, w, head, softmax.unit[r], total, load_sink(p, w, head), shared);
  }
}

// Leaves the results, of this warpgroup's half of the channels, in shared memory.
template <int kHalf>
__device__ __forceinline__ void attend_values(const DecodeParams& p, const Work& w, SharedMemory& shared) {
  const Place place = my_place();
  Barriers& barriers = shared.barriers;
  if (kHalf == 1 && p.o_accum == nullptr)
    load_rotation(p.finish, w, static_cast<int>(threadIdx.x) % kWarpgroupThreads, shared.rotation);

  Half o = {};  // the first tile's decay is 0
  int stage = 0;
  uint32_t phase = 0;
  for (int tile = w.range.begin; tile < w.range.end; ++tile) {
    ptx::mbarrier_wait(ptx::shared_address(&barriers.full[stage][kHalf]), phase);
    ptx::mbarrier_wait(ptx::shared_address(&barriers.decay_full[stage]), phase);
    const float decay[2] = {shared.decay[stage][place.row], shared.decay[stage][place.row + 8]};
#pragma unroll
    for (int i = 0; i < kQuarterRegs; ++i) {
      o[0][i] *= decay[i / 2 % 2];
      o[1][i] *= decay[i / 2 % 2];
    }
    ptx::mbarrier_wait(ptx::shared_address(&barriers.weights_full), stage);
    ptx::fence_proxy_async();
    add_values<kHalf>(o, shared, stage);
    ptx::mbarrier_arrive(ptx::shared_address(&barriers.empty[stage][kHalf]));
    ptx::mbarrier_arrive(ptx::shared_address(&barriers.weights_empty));
    stage ^= 1;
    phase ^= stage == 0;
  }
  // Both halves are done with the last tile: keys and weights are no longer needed.
  ptx::mbarrier_wait(ptx::shared_address(&barriers.weights_empty), stage ^ 1);
  stage_results<kHalf>(o, place, ptx::shared_address(shared.keys));
}

}  // namespace sgl_dsv4::sm90
