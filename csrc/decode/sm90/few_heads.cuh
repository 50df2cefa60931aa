// The consuming warpgroups for 8, 16 or 32 heads a block: keys are rows and heads are columns, so that no part of a
// product is padding. S^T = K Q^T, online softmax down the columns, O^T += V^T P^T.
//
// Warpgroup 0 computes the scores of a tile (64 keys x kHeads) and puts the weights, as bf16, and the heads' decay into
// shared memory; then each warpgroup adds to its half of the channels, four blocks of 64. Buffers as in attend.cuh.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ptx.cuh"
#include "decode/sm90/consume.cuh"
#include "decode/sm90/output.cuh"
#include "decode/sm90/wgmma.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

// A thread's accumulator (wgmma.cuh) has two rows, `upper` and 8 below, and two columns of each group of 8 heads.
template <int kHeads>
struct FewHeads {
  using Shared = FewHeadsSharedMemory<kHeads>;
  static constexpr int kGroups = kHeads / 8;
  static constexpr int kRegs = kHeads / 2;
  static constexpr int kBlocks = kChannelBlocks / 2;  // of channels, a warpgroup

  // Maximum or sum over the lanes that share columns.
  __device__ __forceinline__ static float column_max(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
  }
  __device__ __forceinline__ static float column_sum(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
  }

  __device__ __forceinline__ static void compute_scores(float (&s)[kRegs], Shared& shared, int stage) {
    const uint64_t q = operand(ptx::shared_address(shared.q));
    const uint64_t keys = operand(ptx::shared_address(shared.keys[stage]));
    wgmma_begin(s);
#pragma unroll
    for (int block = 0; block < kChannelBlocks; ++block) {
#pragma unroll
      for (int k = 0; k < kBlockChannels / 16; ++k)
        wgmma_few_heads<false>(s, keys + descriptor_step(block * kBlockBytes + k * 32),
                               q + descriptor_step(block * kHeads * kRowBytes + k * 32), block + k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>(s);
  }

  // Of a thread's columns, in log2: the largest score, the unit of the last tile, and this thread's share of the sum.
  struct Softmax {
    float top[kGroups][2], unit[kGroups][2], total[kGroups][2];

    __device__ __forceinline__ Softmax() {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          top[j][c] = unit[j][c] = kMinusInfinity;
          total[j][c] = 0.0f;
        }
      }
    }

    // Scores -> weights and decay in shared memory.
    __device__ __forceinline__ void update(float (&s)[kRegs], const Place& place, Shared& shared, int stage,
                                           float scale) {
      const int warp = place.row / 16, lane = static_cast<int>(threadIdx.x) % 32;
      const int bit = lane / 4 * 4;
      const bool upper = shared.attended[stage][2 * warp] >> bit & 1u;
      const bool lower = shared.attended[stage][2 * warp + 1] >> bit & 1u;
#pragma unroll
      for (int i = 0; i < kRegs; ++i) s[i] = (i % 4 < 2 ? upper : lower) ? s[i] * scale : kMinusInfinity;

      // Maxima of the tile, over the warps.
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const float most0 = column_max(fmaxf(s[4 * j], s[4 * j + 2]));
        const float most1 = column_max(fmaxf(s[4 * j + 1], s[4 * j + 3]));
        if (lane < 4)
          *reinterpret_cast<float2*>(&shared.warp_values[warp][8 * j + place.column]) = make_float2(most0, most1);
      }
      ptx::bar_sync(kScoresMeet, kWarpgroupThreads);

      const uint32_t weights = ptx::shared_address(shared.weights[stage]);
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const int head = 8 * j + place.column;
        float2 most = *reinterpret_cast<const float2*>(&shared.warp_values[0][head]);
#pragma unroll
        for (int other = 1; other < 4; ++other) {
          const float2 x = *reinterpret_cast<const float2*>(&shared.warp_values[other][head]);
          most = make_float2(fmaxf(most.x, x.x), fmaxf(most.y, x.y));
        }
        float decay[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float tile_most = c == 0 ? most.x : most.y;
          top[j][c] = fmaxf(top[j][c], tile_most);
          const float now = fmaxf(tile_most, top[j][c] - kUnitRange);
          const float base = now == kMinusInfinity ? 0.0f : now;  // -inf - -inf would be NaN
          decay[c] = ptx::ex2(unit[j][c] - base);
          unit[j][c] = now;
          s[4 * j + c] = ptx::ex2(s[4 * j + c] - base);
          s[4 * j + 2 + c] = ptx::ex2(s[4 * j + 2 + c] - base);
          total[j][c] = fmaf(total[j][c], decay[c], s[4 * j + c] + s[4 * j + 2 + c]);
        }
        const uint32_t at = weights + weight_offset(place.row, head);
        ptx::st_shared(at, ptx::cvt_bf16x2(s[4 * j], s[4 * j + 1]));
        ptx::st_shared(at + kWeightGroupBytes, ptx::cvt_bf16x2(s[4 * j + 2], s[4 * j + 3]));
        if (place.row == 0) *reinterpret_cast<float2*>(&shared.decay[stage][head]) = make_float2(decay[0], decay[1]);
      }
      ptx::fence_proxy_async();
    }

    // Sums and units of all heads into shared memory.
    __device__ __forceinline__ void finish(const Place& place, Shared& shared) {
      const int warp = place.row / 16, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const float sum0 = column_sum(total[j][0]), sum1 = column_sum(total[j][1]);
        const int head = 8 * j + place.column;
        if (lane < 4) *reinterpret_cast<float2*>(&shared.warp_values[warp][head]) = make_float2(sum0, sum1);
        if (place.row == 0) *reinterpret_cast<float2*>(&shared.unit[head]) = make_float2(unit[j][0], unit[j][1]);
      }
      ptx::bar_sync(kScoresMeet, kWarpgroupThreads);
      const int head = static_cast<int>(threadIdx.x);
      if (head < kHeads)
        shared.total[head] = (shared.warp_values[0][head] + shared.warp_values[1][head]) +
                             (shared.warp_values[2][head] + shared.warp_values[3][head]);
    }
  };

  // O^T = O^T * decay + V^T P^T for half of the channels.
  template <int kHalf>
  __device__ __forceinline__ static void add_values(float (&o)[kBlocks][kRegs], const Place& place, Shared& shared,
                                                    int stage, bool first) {
    if (!first) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const float2 decay = *reinterpret_cast<const float2*>(&shared.decay[stage][8 * j + place.column]);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o[block][4 * j + i] *= i % 2 == 0 ? decay.x : decay.y;
        }
      }
    }
    const uint64_t weights = weight_descriptor(ptx::shared_address(shared.weights[stage]));
    const uint64_t values = operand(ptx::shared_address(shared.keys[stage]));
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) wgmma_begin(o[block]);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int k = 0; k < kTileKeys / 16; ++k)
        wgmma_few_heads<true>(o[block],
                              values + descriptor_step((kHalf * kBlocks + block) * kBlockBytes + k * 2 * kGroupBytes),
                              weights + descriptor_step(k * 2 * kWeightGroupBytes), !first || k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>(o[0]);
#pragma unroll
    for (int block = 1; block < kBlocks; ++block) pin(o[block]);
  }

  template <int kHalf>
  __device__ __forceinline__ static void stage_results(const float (&o)[kBlocks][kRegs], const Place& place,
                                                       float* results) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kRegs; ++i) {
        const int head = i / 4 * 8 + place.column + i % 2;
        const int channel = (kHalf * kBlocks + block) * kBlockChannels + place.row + i / 2 % 2 * 8;
        results[head * kFewResultPitch + channel] = o[block][i];
      }
    }
  }

  // Leaves the results, of this warpgroup's half of the channels, in shared memory.
  template <int kHalf>
  __device__ __forceinline__ static void attend(const DecodeParams& p, const Work& w, Shared& shared) {
    const Place place = my_place();
    const bool elected = threadIdx.x % 32 == 0;
    const query::Factors factors = load_q<kHeads>(p, w, ptx::shared_address(shared.q));
    finish_q<kHeads>(p, w, ptx::shared_address(shared.q), factors);
    ptx::fence_proxy_async();
    consumers_meet();
    // Here, because this warpgroup has nothing to do until the first tile's weights are there.
    if (kHalf == 1 && p.o_accum == nullptr)
      load_epilogue_inputs(p.finish, w, static_cast<int>(threadIdx.x) - kWarpgroupThreads, shared.sink,
                           shared.rotation);

    Softmax softmax;
    float o[kBlocks][kRegs] = {};
    int stage = 0;
    uint32_t phase = 0;
    for (int tile = w.range.begin; tile < w.range.end; ++tile) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage]), phase);
      if constexpr (kHalf == 0) {
        float s[kRegs] = {};
        compute_scores(s, shared, stage);
        softmax.update(s, place, shared, stage, p.scale_log2);
      }
      consumers_meet();
      add_values<kHalf>(o, place, shared, stage, tile == w.range.begin);
      __syncwarp();
      if (elected) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage]));
      stage ^= 1;
      phase ^= stage == 0;
    }

    if constexpr (kHalf == 0) softmax.finish(place, shared);
    consumers_meet();  // the keys are no longer needed
    stage_results<kHalf>(o, place, reinterpret_cast<float*>(shared.keys));
  }
};

}  // namespace sgl_dsv4::sm90
