// Two splits of a row merged on chip: 8, 16 or 32 heads a block, a cluster of two blocks a row. The attending warps of
// a block merge half of the heads and write their outputs; the other block's results they read from its shared memory.
// Bits are those of partials and the combine kernel.
//
// Cluster barriers, of all threads of both blocks: their results are in shared memory; nobody reads them any more. What
// the copying and weighing warps wrote is ordered by the block's own barriers; they take part because racecheck of
// compute-sanitizer knows no other order.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ptx.cuh"
#include "decode/epilogue.cuh"
#include "decode/finish.cuh"
#include "decode/sm90/output.cuh"
#include "decode/sm90/raw_tiles.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

// The splits of a row and its heads are neighbours.
__device__ __forceinline__ Part my_part_of_pair(const DecodeParams& p, int block_heads) {
  const uint32_t block = ptx::ctaid_x(), pair = block / kPair, groups = static_cast<uint32_t>(p.groups.divisor);
  const uint32_t token = divide(pair, p.groups);
  return part_at<false>(p, block_heads, (token * kPair + block % kPair) * groups + (pair - token * groups));
}

// What warps that do not merge do at their end.
__device__ __forceinline__ void pass_cluster_barriers() {
  for (int i = 0; i < 2; ++i) {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
}

// A split without keys, by the attending warps: what the merge reads of it.
template <int kHeads, typename Shared>
__device__ __forceinline__ void leave_empty_split(const CombineParams& p, const Part& w, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kHeads) shared.factor[thread] = kMinusInfinity;
  load_rotation(p, w, thread, shared.rotation);
  ptx::bar_sync(kConsumersMeet, kAttendThreads);
}

// By the attending warps: some groups of channels of a head each.
template <int kHeads, typename Shared>
__device__ __forceinline__ void write_pair(const DecodeParams& params, const Part& w, const Shared& shared, int warp) {
  constexpr int kOwnHeads = kHeads / kPair, kHeadWarps = kAttendWarps / kOwnHeads;
  constexpr int kCount = finish::kGroups / kHeadWarps;
  static_assert(kOwnHeads * kHeadWarps == kAttendWarps && kCount * kHeadWarps == finish::kGroups);
  const CombineParams& p = params.finish;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = w.split * kOwnHeads + warp / kHeadWarps, first_group = warp % kHeadWarps * kCount;
  const int there = 1 - w.split;
  const float4* results = reinterpret_cast<const float4*>(shared.results[head]) + 32 * first_group + lane;
  const auto address_there = [&](const void* here) { return ptx::cluster_address(ptx::shared_address(here), there); };
  // All warps have met: one orders what they wrote. It would wait for loads under way too.
  if (warp == 0) {
    ptx::cluster_arrive();
  } else {
    ptx::cluster_arrive_relaxed();
  }
  const float sink = load_sink(params, w, head);
  ptx::cluster_wait();

  // An empty split has no results: where they would lie, copies of a tile may have landed.
  float4 theirs[kCount], mine[kCount];
  const float their_lse = ptx::ld_cluster(address_there(&shared.factor[head]));
  // What is read is used below: a load must not be under way when the other block may end.
  const bool any_there = their_lse != kMinusInfinity;
  const float their_inverse = ptx::ld_cluster_if(any_there, address_there(&shared.inverse[head]));
#pragma unroll
  for (int i = 0; i < kCount; ++i) theirs[i] = ptx::ld_cluster_v4_if(any_there, address_there(results + 32 * i));
#pragma unroll
  for (int i = 0; i < kCount; ++i) mine[i] = results[32 * i];
  const float my_lse = shared.factor[head], my_inverse = shared.inverse[head];

  // As combine.cu does it.
  const float most = fmaxf(my_lse, their_lse);
  finish::Values<kCount> merged = {};
  float lse = INFINITY;
  if (my_lse != kMinusInfinity || their_lse != kMinusInfinity) {
    const float my_weight = ptx::ex2(my_lse - most), their_weight = ptx::ex2(their_lse - most);
    const float sum = my_weight + their_weight, inverse = 1.0f / sum;
    lse = finish::natural_lse(most, sum);
#pragma unroll
    for (int split = 0; split < kPair; ++split) {
      const bool is_mine = split == w.split;
      const float weight = (is_mine ? my_weight : their_weight) * inverse;
      const float split_inverse = is_mine ? my_inverse : their_inverse;
      const bool any = (is_mine ? my_lse : their_lse) != kMinusInfinity;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const auto add = [&](float& to, float of_mine, float of_theirs) {
          to = fmaf(weight, any ? (is_mine ? of_mine : of_theirs) * split_inverse : 0.0f, to);
        };
        add(merged[i][0], mine[i].x, theirs[i].x);
        add(merged[i][1], mine[i].y, theirs[i].y);
        add(merged[i][2], mine[i].z, theirs[i].z);
        add(merged[i][3], mine[i].w, theirs[i].w);
      }
    }
    const float factor = epilogue::sink_factor(sink, lse);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int group = first_group + i;
      const finish::Place place = {w.token, w.first_head + head, group, lane,
                                   group * finish::kGroupChannels + lane * finish::kVec};
      finish::Rotation turn = {};
      if (finish::rotates(place, p)) {
        const float4 f = *reinterpret_cast<const float4*>(shared.rotation + place.channel - kNopeDim);
        turn = {{make_float2(f.x, f.y), make_float2(f.z, f.w)}};
      }
      finish::apply_sink_and_rope(merged[i], factor, turn, place, p);
    }
  }
  // What was read has arrived: nobody needs the other block any more.
#pragma unroll
  for (int i = 0; i < kCount * finish::kVec; ++i) ptx::keep(merged[i / finish::kVec][i % finish::kVec]);
  ptx::cluster_arrive_relaxed();
  if (head < w.heads) {
    finish::store_output<kCount>(
        merged,
        {w.token, w.first_head + head, first_group, lane, first_group * finish::kGroupChannels + lane * finish::kVec},
        p);
    if (first_group == 0 && lane == 0)
      p.lse[w.token * p.stride_lse_token + (w.first_head + head) * p.stride_lse_head] = lse;
  }
  ptx::cluster_wait();
}

}  // namespace sgl_dsv4::sm90
