// What the consuming warpgroups of 64 heads a block share: barriers, places, the unit of weights, the query. The other
// kernels take the unit, that of 8 heads st_query() too.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"
#include "decode/query.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

inline constexpr int kConsumerWarps = kConsumerThreads / 32;

__device__ __forceinline__ void init_barriers(Barriers& barriers) {
  const auto init = [](uint64_t& barrier, int threads) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), static_cast<uint32_t>(threads));
  };
  for (int i = 0; i < kStages * 2; ++i) {
    init(barriers.full[i / 2][i % 2], kGatherThreads);
    init(barriers.empty[i / 2][i % 2], kWarpgroupThreads);
  }
  for (uint64_t& barrier : barriers.measured) init(barrier, kWarpgroupThreads);
  for (uint64_t& barrier : barriers.weighed) init(barrier, kWarpgroupThreads);
}

// A thread's place in an accumulator (wgmma.cuh).
struct Place {
  int row;     // the upper of its two rows, the other is 8 below
  int column;  // first of its two columns in a group of 8

  __device__ __forceinline__ int pair() const {  // which pair of rows it is
    return row / 16 * 8 + row % 8;
  }
};

__device__ __forceinline__ Place place_of(int block_thread) {
  const int thread = block_thread % kWarpgroupThreads;
  return {thread / 32 * 16 + thread % 32 / 4, thread % 4 * 2};
}

__device__ __forceinline__ void consumers_meet() {
  ptx::bar_sync(kConsumersMeet, kConsumerThreads);
}

// ---- the unit of weights ----
//
// Weights are powers of 2 relative to the unit of their tile: the head's largest score in the tile. So a tile's
// weights, and how bf16 rounds them, do not depend on how keys are cut into splits. A tile whose scores all lie more
// than kUnitRange below the largest so far is measured against 2^-kUnitRange of that largest instead, which bounds the
// sums.

inline constexpr float kUnitRange = 16.0f;

// What scores of a tile with this unit are measured against. -inf - -inf would be NaN.
__device__ __forceinline__ float base_of(float unit) {
  return unit == kMinusInfinity ? 0.0f : unit;
}

// What sums in units of 2^unit are multiplied by where scores are measured against `next`.
__device__ __forceinline__ float decay_to(float unit, float next) {
  return ptx::ex2(unit - base_of(next));
}

// Moves a head's largest score so far and the unit of its last tile, both in log2, on to a tile whose largest score is
// `tile_most`. Returns what earlier sums are multiplied by.
__device__ __forceinline__ float next_unit(float tile_most, float& top, float& unit) {
  top = fmaxf(top, tile_most);
  const float now = fmaxf(tile_most, top - kUnitRange);
  const float decay = decay_to(unit, now);
  unit = now;
  return decay;
}

// ---- the query ----
//
// A warp has heads warp, warp + 8, ...; of each a lane copies the two vectors that query.cuh names, and normalises what
// it copied, in place. So the warps meet only when Q is complete.

using QueryVector = Words<query::kPairs>;

inline constexpr int kHeadsAtOnce = 2;  // that a warp normalises, as many as its registers hold

__device__ __forceinline__ uint32_t q_vector(uint32_t q, int head, int vector, int lane) {
  return q + q_offset(head, (32 * vector + lane) * query::kVec, kTileHeads);
}
__device__ __forceinline__ QueryVector ld_query(uint32_t address) {
  const uint4 v = ptx::ld_shared(address);
  return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ void st_query(uint32_t address, const QueryVector& v) {
  ptx::st_shared(address, make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]));
}

// Starts the copies of the block's heads into shared memory at `q`, by both warpgroups, beside the loads of the
// lengths: whether the block has keys is not known yet. Heads past the last become zeros. Returns the row's position,
// where its query is rotated.
__device__ __forceinline__ query::Position load_q(const DecodeParams& p, const Part& w, uint32_t q) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const query::Position position = query::load_position(p.query, w.token, p.query.freqs_cis != nullptr);
  const auto* rows = static_cast<const __nv_bfloat16*>(p.q) + w.token * p.stride_q_token +
                     w.first_head * p.stride_q_head + lane * query::kVec;
  constexpr int kVectorStep = 32 * query::kVec;
  if (p.q_is_aligned) {
#pragma unroll
    for (int head = warp; head < warp + kTileHeads; head += kConsumerWarps) {
      const bool wanted = head < w.heads;
      const auto* row = rows + (wanted ? head : 0) * p.stride_q_head;
#pragma unroll
      for (int v = 0; v < query::kVectors; ++v)
        ptx::cp_async_16_if(wanted, q_vector(q, head, v, lane), row + v * kVectorStep);
      if ((head - warp) / kConsumerWarps % kHeadsAtOnce == kHeadsAtOnce - 1) ptx::cp_async_commit();
    }
  } else {
#pragma unroll 1
    for (int head = warp; head < kTileHeads; head += kConsumerWarps) {
#pragma unroll
      for (int v = 0; v < query::kVectors; ++v) {
        QueryVector x = {};
        if (head < w.heads) x = query::load_vector<false>(rows + head * p.stride_q_head + v * kVectorStep);
        st_query(q_vector(q, head, v, lane), x);
      }
    }
  }
  return position;
}

// As the copies arrive; zeros past the last head stay zeros.
__device__ __forceinline__ void normalise_q(const DecodeParams& p, const Part& w, uint32_t q, int thread) {
  constexpr int kRounds = kTileHeads / (kHeadsAtOnce * kConsumerWarps);
  const int warp = thread / 32, lane = thread % 32;
#pragma unroll 1
  for (int first = warp; first < w.heads; first += kHeadsAtOnce * kConsumerWarps) {
    ptx::cp_async_wait_but<kRounds - 1>();
    ptx::cp_async_commit();  // an empty group: so the count is right in every round
    query::Values heads[kHeadsAtOnce];
#pragma unroll
    for (int i = 0; i < kHeadsAtOnce * query::kVectors; ++i)
      heads[i / query::kVectors].vector[i % query::kVectors] =
          ld_query(q_vector(q, first + i / query::kVectors * kConsumerWarps, i % query::kVectors, lane));
    query::normalise(heads, p.query.eps);
#pragma unroll
    for (int i = 0; i < kHeadsAtOnce * query::kVectors; ++i) {
      const int head = first + i / query::kVectors * kConsumerWarps;
      if (head < w.heads)
        st_query(q_vector(q, head, i % query::kVectors, lane), heads[i / query::kVectors].vector[i % query::kVectors]);
    }
  }
}

// Four heads of a warp at once, eight lanes each.
__device__ __forceinline__ void rotate_q(const Part& w, uint32_t q, const query::Factors& factors, int thread) {
  constexpr int kStep = 32 / query::kRopeVectors * kConsumerWarps;
  const int warp = thread / 32, lane = thread % 32;
  const int first = warp + lane / query::kRopeVectors * kConsumerWarps;
  __syncwarp();  // what the warp's other lanes have copied and normalised is in shared memory
#pragma unroll
  for (int head = first; head < first + kTileHeads; head += kStep) {
    if (head >= w.heads) break;
    const uint32_t at = q_vector(q, head, query::kVectors - 1, query::kFirstRopeLane + lane % query::kRopeVectors);
    QueryVector v = ld_query(at);
    query::rotate(v, factors);
    st_query(at, v);
  }
}

// Q in shared memory at `q`, with its norm and rotation, where they are asked for: by both warpgroups, in one place of
// a kernel, behind load_q().
__device__ __forceinline__ void finish_q(const DecodeParams& p, const Work& w, query::Position position, uint32_t q) {
  query::Factors factors = {};
  if (p.query.freqs_cis != nullptr)
    factors = query::load_factors<false>(p.query, position, static_cast<int>(threadIdx.x) % query::kRopeVectors);
  if (p.query.has_norm) normalise_q(p, w, q, static_cast<int>(threadIdx.x));
  ptx::cp_async_wait();
  if (p.query.freqs_cis != nullptr) rotate_q(w, q, factors, static_cast<int>(threadIdx.x));
  ptx::fence_proxy_async();
  consumers_meet();
}

}  // namespace sgl_dsv4::sm90
