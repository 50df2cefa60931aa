// The consuming warpgroups for 16 or 32 heads a block: keys are rows and heads are columns, so that no part of a
// product is padding. S^T = K Q^T, online softmax down the columns, O^T += V^T P^T.
//
// Warpgroup 0 computes the scores of a tile (64 keys x kHeads) and puts the weights, as bf16, and the heads' decay into
// shared memory, warpgroup 1 adds to all of O. Order and barriers as in attend.cuh.
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

  // Maxima over the 8 lanes that share columns. Of several values, each step keeps half and gives the other half away:
  // afterwards x[0] is the maximum of value number value_of(lane).
  static constexpr int kValues = 2 * kGroups;
  __device__ __forceinline__ static void column_max(float (&x)[kValues], int lane) {
    int count = kValues;
#pragma unroll
    for (int lanes = 16; lanes >= 4; lanes /= 2) {
      if (count > 1) {
        count /= 2;
#pragma unroll
        for (int i = 0; i < kValues / 2; ++i) {
          if (i >= count) break;
          const bool upper = lane & lanes;
          const float kept = upper ? x[i + count] : x[i], given = upper ? x[i] : x[i + count];
          x[i] = fmaxf(kept, __shfl_xor_sync(0xffffffffu, given, lanes));
        }
      } else {
        x[0] = fmaxf(x[0], __shfl_xor_sync(0xffffffffu, x[0], lanes));
      }
    }
  }
  __device__ __forceinline__ static int value_of(int lane) { return lane / (32 / kValues); }

  // Sum over the lanes that share columns.
  __device__ __forceinline__ static float column_sum(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
  }

  __device__ __forceinline__ static void compute_scores(float (&s)[kRegs], Shared& shared, int stage, uint32_t phase) {
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
        for (int k = 0; k < kBlockChannels / 16; ++k)
          wgmma_few_heads<false>(s, keys + descriptor_step(block * kBlockBytes + k * 32),
                                 q + descriptor_step(block * kHeads * kRowBytes + k * 32), block + k > 0);
      }
      wgmma_commit();
    }
    wgmma_wait<0>(s);
  }

  // Of a thread's columns, in log2: the largest score, the unit of the last tile; what earlier sums are multiplied by,
  // and this thread's share of the sum.
  struct Softmax {
    float top[kGroups][2], unit[kGroups][2], decay[kGroups][2], total[kGroups][2];

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

    // Scales the scores, -inf for keys that are not attended. Moves on to the unit of their tile and stores what
    // earlier sums are multiplied by.
    __device__ __forceinline__ void measure(float (&s)[kRegs], const Place& place, Shared& shared, int stage,
                                            float scale) {
      const int warp = place.row / 16, lane = static_cast<int>(threadIdx.x) % 32;
      const int bit = lane / 4 * 4;
      const bool upper = shared.attended[stage][2 * warp] >> bit & 1u;
      const bool lower = shared.attended[stage][2 * warp + 1] >> bit & 1u;
#pragma unroll
      for (int i = 0; i < kRegs; ++i) s[i] = (i % 4 < 2 ? upper : lower) ? s[i] * scale : kMinusInfinity;

      // Maxima of the tile, over the warps. When the next but one replaces them, all have met for the one between.
      float most[kValues];
#pragma unroll
      for (int v = 0; v < kValues; ++v) most[v] = fmaxf(s[v / 2 * 4 + v % 2], s[v / 2 * 4 + v % 2 + 2]);
      column_max(most, lane);
      shared.warp_values[stage][value_of(lane) / 2 * 8 + place.column + value_of(lane) % 2][warp] = most[0];
      ptx::bar_sync(kScoresMeet, kWarpgroupThreads);

#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const int head = 8 * j + place.column;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float4 x = *reinterpret_cast<const float4*>(shared.warp_values[stage][head + c]);
          decay[j][c] = next_unit(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), top[j][c], unit[j][c]);
        }
        if (place.row == 0)
          *reinterpret_cast<float2*>(&shared.decay[stage][head]) = make_float2(decay[j][0], decay[j][1]);
      }
    }

    // Scores -> weights, in place.
    __device__ __forceinline__ void weigh(float (&s)[kRegs]) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float base = base_of(unit[j][c]);
          s[4 * j + c] = ptx::ex2(s[4 * j + c] - base);
          s[4 * j + 2 + c] = ptx::ex2(s[4 * j + 2 + c] - base);
          total[j][c] = fmaf(total[j][c], decay[j][c], s[4 * j + c] + s[4 * j + 2 + c]);
        }
      }
    }

    // Writes the LSEs and leaves in shared memory what the values are to be multiplied by. `stage`: of a tile after the
    // last.
    __device__ __forceinline__ void finish_heads(const DecodeParams& p, const Work& w, const Place& place,
                                                 Shared& shared, int stage) {
      const int head_of_thread = static_cast<int>(threadIdx.x);
      const float sink = load_sink(p, w, head_of_thread);
      const int warp = place.row / 16, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int head = 8 * j + place.column + c;
          const float sum = column_sum(total[j][c]);
          if (lane < 4) shared.warp_values[stage][head][warp] = sum;
          if (place.row == 0) shared.factor[head] = unit[j][c];
        }
      }
      ptx::bar_sync(kScoresMeet, kWarpgroupThreads);
      if (head_of_thread >= kHeads) return;
      const float4 x = *reinterpret_cast<const float4*>(shared.warp_values[stage][head_of_thread]);
      finish_head(p, w, head_of_thread, shared.factor[head_of_thread], (x.x + x.y) + (x.z + x.w), sink, shared);
    }
  };

  __device__ __forceinline__ static void store_weights(const float (&s)[kRegs], const Place& place, Shared& shared) {
    const uint32_t weights = ptx::shared_address(shared.weights);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const uint32_t at = weights + weight_offset(place.row, 8 * j + place.column);
      ptx::st_shared(at, ptx::cvt_bf16x2(s[4 * j], s[4 * j + 1]));
      ptx::st_shared(at + kWeightGroupBytes, ptx::cvt_bf16x2(s[4 * j + 2], s[4 * j + 3]));
    }
  }

  // O^T += V^T P^T, half of the channels after the other: starts the products.
  __device__ __forceinline__ static void add_values(float (&o)[kChannelBlocks][kRegs], Shared& shared, int stage) {
    const uint64_t weights = weight_descriptor(ptx::shared_address(shared.weights));
    const uint64_t values = operand_descriptor(ptx::shared_address(shared.keys[stage]));
#pragma unroll
    for (int block = 1; block < kChannelBlocks; ++block) pin(o[block]);
    wgmma_begin(o[0]);
#pragma unroll
    for (int block = 0; block < kChannelBlocks; ++block) {
#pragma unroll
      for (int k = 0; k < kTileKeys / 16; ++k)
        wgmma_few_heads<true>(o[block], values + descriptor_step(block * kBlockBytes + k * 2 * kGroupBytes),
                              weights + descriptor_step(k * 2 * kWeightGroupBytes), true);
      if (block % kHalfBlocks == kHalfBlocks - 1) wgmma_commit();
    }
  }

  __device__ __forceinline__ static void stage_results(const float (&o)[kChannelBlocks][kRegs], const Place& place,
                                                       float* results) {
#pragma unroll
    for (int block = 0; block < kChannelBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kRegs; ++i) {
        const int head = i / 4 * 8 + place.column + i % 2;
        const int channel = block * kBlockChannels + place.row + i / 2 % 2 * 8;
        results[head * kFewResultPitch + channel] = o[block][i];
      }
    }
  }

  // Writes the LSEs and leaves in shared memory what the values are to be multiplied by.
  __device__ __forceinline__ static void attend_scores(const DecodeParams& p, const Work& w, Shared& shared) {
    const Place place = my_place();
    Barriers& barriers = shared.barriers;
    Softmax softmax;
    int stage = 0;
    uint32_t phase = 0;
    for (int tile = w.range.begin; tile < w.range.end; ++tile) {
      float s[kRegs] = {};
      compute_scores(s, shared, stage, phase);
      softmax.measure(s, place, shared, stage, p.scale_log2);
      ptx::mbarrier_arrive(ptx::shared_address(&barriers.decay_full[stage]));

      softmax.weigh(s);
      ptx::mbarrier_wait(ptx::shared_address(&barriers.weights_empty), stage ^ 1);
      store_weights(s, place, shared);
      ptx::mbarrier_arrive(ptx::shared_address(&barriers.weights_full));
      stage ^= 1;
      phase ^= stage == 0;
    }
    softmax.finish_heads(p, w, place, shared, stage);
  }

  // Leaves the results in shared memory.
  __device__ __forceinline__ static void attend_values(const DecodeParams& p, const Work& w, Shared& shared) {
    const Place place = my_place();
    Barriers& barriers = shared.barriers;
    if (p.o_accum == nullptr)
      load_rotation(p.finish, w, static_cast<int>(threadIdx.x) % kWarpgroupThreads, shared.rotation);

    float o[kChannelBlocks][kRegs] = {};  // the first tile's decay is 0
    int stage = 0;
    uint32_t phase = 0;
    for (int tile = w.range.begin; tile < w.range.end; ++tile) {
      ptx::mbarrier_wait(ptx::shared_address(&barriers.full[stage][0]), phase);
      ptx::mbarrier_wait(ptx::shared_address(&barriers.full[stage][1]), phase);
      ptx::mbarrier_wait(ptx::shared_address(&barriers.decay_full[stage]), phase);
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const float2 decay = *reinterpret_cast<const float2*>(&shared.decay[stage][8 * j + place.column]);
#pragma unroll
        for (int block = 0; block < kChannelBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o[block][4 * j + i] *= i % 2 == 0 ? decay.x : decay.y;
        }
      }
      ptx::mbarrier_wait(ptx::shared_address(&barriers.weights_full), stage);
      ptx::fence_proxy_async();
      add_values(o, shared, stage);
      wgmma_wait<1>(o[0]);
      ptx::mbarrier_arrive(ptx::shared_address(&barriers.empty[stage][0]));
      wgmma_wait<0>(o[0]);
#pragma unroll
      for (int block = 1; block < kChannelBlocks; ++block) pin(o[block]);
      ptx::mbarrier_arrive(ptx::shared_address(&barriers.empty[stage][1]));
      ptx::mbarrier_arrive(ptx::shared_address(&barriers.weights_empty));
      stage ^= 1;
      phase ^= stage == 0;
    }
    // All warps are done with the last tile: keys are no longer needed.
    ptx::mbarrier_wait(ptx::shared_address(&barriers.weights_empty), stage ^ 1);
    stage_results(o, place, reinterpret_cast<float*>(shared.keys));
  }
};

}  // namespace sgl_dsv4::sm90
