// What the consuming warpgroups of both kernels share.
//
// Weights are powers of 2 relative to the unit of their tile: the row's largest score in the tile. So a tile's weights,
// and how bf16 rounds them, do not depend on how keys are cut into splits. A tile whose scores all lie more than
// kUnitRange below the largest so far is measured against 2^-kUnitRange of that largest instead, which bounds the sums.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

inline constexpr float kUnitRange = 16.0f;

// A thread's place in an accumulator (wgmma.cuh).
struct Place {
  int row;     // the upper of its two rows, the other is 8 below
  int column;  // first of its two columns in a group of 8
};

__device__ __forceinline__ Place my_place() {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
  return {thread / 32 * 16 + thread % 32 / 4, thread % 4 * 2};
}

__device__ __forceinline__ void consumers_meet() {
  ptx::bar_sync(kConsumersMeet, kConsumerThreads);
}

// The block's heads into shared memory at `q`, in blocks of kHeads rows, by both warpgroups: starts the copies. Heads
// past the last become zeros.
template <int kHeads>
__device__ __forceinline__ void load_q(const DecodeParams& p, const Work& w, uint32_t q) {
  const uint16_t* rows =
      static_cast<const uint16_t*>(p.q) + w.token * p.stride_q_token + w.first_head * p.stride_q_head;
  constexpr int kVectors = kHeadDim / 8;  // of 16 bytes, a row
  constexpr int kStep = kConsumerThreads / kVectors;
  const int first = static_cast<int>(threadIdx.x) / kVectors;
  const int channel = static_cast<int>(threadIdx.x) % kVectors * 8;
  if (p.q_is_aligned) {
#pragma unroll
    for (int head = first; head < first + kHeads; head += kStep) {
      const bool wanted = head < w.heads;
      ptx::cp_async_16_if(wanted, q + q_offset(head, channel, kHeads),
                          rows + (wanted ? head : 0) * p.stride_q_head + channel);
    }
    return;
  }
#pragma unroll 1
  for (int head = first; head < kHeads; head += kStep) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (head < w.heads) {
      const uint16_t* values = rows + head * p.stride_q_head + channel;
      v.x = values[0] | static_cast<uint32_t>(values[1]) << 16;
      v.y = values[2] | static_cast<uint32_t>(values[3]) << 16;
      v.z = values[4] | static_cast<uint32_t>(values[5]) << 16;
      v.w = values[6] | static_cast<uint32_t>(values[7]) << 16;
    }
    ptx::st_shared(q + q_offset(head, channel, kHeads), v);
  }
}

}  // namespace sgl_dsv4::sm90
