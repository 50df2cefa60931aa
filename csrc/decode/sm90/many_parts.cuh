// Blocks that take one part after the other: 64 heads a block; bf16 outputs without amax, query and outputs that start
// at multiples of 16 bytes. kCut: rows are cut in whole ones and, at most one a block and its last, splits of others,
// of which they write partials.
//
// The gathering warpgroups know no parts: their tiles are those of all parts, one after the other. The attending ones
// ask for the next part's query when the last scores are done. They leave a part's outputs in the stage of its last
// tile, and the copy engine takes them from there while they score the next part's first tile, in the other stage.
//
// barrier         who arrives             what becomes true
// q_full          the copy engine         the next part's query is in shared memory
// kConsumersMeet  attending threads       in turn: Q is normalised and rotated; all products are done, total[] and
//                                           what is coming are there. Before the first part, and behind one without
//                                           tiles: what is coming is there
//
// The others as with one part a block; the tiles of all parts take the stages in turn. A part's last stage is empty
// when its outputs have been copied.
//
// Cycles (1.755 GHz) by clock reads in an instrumented build, 256 and 512 rows of 128 + 512 keys, from the end of a
// part's last scores to that of the next one's first:
//
//   last weights, products            2000    staged, to the copy engine         1400, 300 to 1000
//   both have met                      700    next part: query, both have met    900
//   factors of the outputs            1100    first scores                       1700
//
// Blocks of one part each: 17,000. What was measured on the way: lengths loaded here instead of long before 2500 more
// (one scoreboard with the shuffles behind them); all of Q from the device memory at once 1000 more, by all SMs; the
// gathering warps' first rows asked for when the part begins 1000 more; outputs from registers to memory 4000 more,
// while rows come in; Q by the gathering warps' cp.async 2000 more. First scores issued before the outputs are staged:
// the assembler takes the accumulators for those of the product in flight and serialises all.
#pragma once

#include <cuda.h>

#include <cmath>
#include <cstdint>

#include "common/ptx.cuh"
#include "decode/epilogue.cuh"
#include "decode/finish.cuh"
#include "decode/query.cuh"
#include "decode/sm90/attend.cuh"
#include "decode/sm90/consume.cuh"
#include "decode/sm90/gather.cuh"
#include "decode/sm90/output.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

inline constexpr int kWarpHeads = 16;  // of an attending warp

struct PartsParams {
  // [tokens][channel blocks][heads][64 channels], in boxes of kTileHeads heads, and of kWarpHeads and half of the
  // blocks
  CUtensorMap q, out;
  DecodeParams decode;
  uint32_t num_parts;  // of whole rows, then of splits
};

// ---- the gathering warpgroups ----

// A tile of all the block's parts.
template <bool kCut>
struct Cursor {
  uint32_t at;
  Work w;
  int tile;

  // To the first tile of the next part that has any, and whether there is one.
  __device__ __forceinline__ bool next_part(const PartsParams& params) {
    while ((at += gridDim.x) < params.num_parts) {
      const Part part = part_at<kCut>(params.decode, kTileHeads, at);
      const Lengths lengths = find_lengths(params.decode, part);
      w = my_work(params.decode, part, lengths, load(lengths));
      tile = w.range.begin;
      if (!w.range.empty()) return true;
    }
    return false;
  }
  __device__ __forceinline__ bool next_tile(const PartsParams& params) {
    return ++tile < w.range.end || next_part(params);
  }
};

template <bool kCut>
__device__ __forceinline__ void gather_parts(const PartsParams& params, PartsMemory& shared) {
  const DecodeParams& p = params.decode;
  Cursor<kCut> ahead;
  ahead.at = ptx::ctaid_x();
  const Part part = part_at<kCut>(p, kTileHeads, ahead.at);
  const Lengths lengths_at = find_lengths(p, part);
  Gathering g(p, shared, static_cast<int>(threadIdx.x));
  const Guess guess = guess_keys(p, part, g.key);
  ptx::griddepcontrol_wait();
  const FirstLoads first = load_first(guess, lengths_at);
  ahead.w = g.begin(part, lengths_at, guess, first);
  if (ahead.w.range.empty()) {
    ptx::cp_async_wait();  // the guessed row lands in the same slots
    if (!ahead.next_part(params)) return;
    g.begin_row(p.source[ahead.tile >= ahead.w.row.main_blocks], load_slot(p, ahead.w, ahead.tile, g.key));
  } else {
    ahead.tile = ahead.w.range.begin;
    g.correct(ahead.w, guess, first);
  }
  // Of the tile behind this one: whether there is one, and the row's slot and cache.
  bool more = ahead.next_tile(params);
  int next_slot = more ? load_slot(p, ahead.w, ahead.tile, g.key) : -1;
  bool next_extra = ahead.tile >= ahead.w.row.main_blocks;
  g.read_first();
#pragma unroll 1
  for (bool last = false; !last;) {
    last = !more;
    g.take_tile([&] {
      g.next = g.my_part_of(p.source[next_extra], next_slot);
      more = more && ahead.next_tile(params);
      next_slot = load_slot_inline(p, ahead.w, ahead.tile, g.key);
      next_extra = ahead.tile >= ahead.w.row.main_blocks;
      g.scales = ptx::ld_global_v2_if(g.next.attended, g.next.scales);
    });
  }
  ptx::cp_async_wait();
}

// ---- outputs ----

// Rows without keys become zeros, whatever the products of their keys are.
__device__ __forceinline__ void clear_empty(Half& o, const float (&inverse)[2]) {
  if (!__any_sync(kAllLanes, inverse[0] == 0.0f || inverse[1] == 0.0f)) return;
#pragma unroll
  for (int i = 0; i < kQuarterRegs; ++i)
    if (inverse[i / 2 % 2] == 0.0f) o[0][i] = o[1][i] = 0.0f;
}

// This warp's heads and its warpgroup's half of the channels, from the accumulators to shared memory at `staged` and
// from there to the outputs. Warpgroup 0 writes the LSEs. `total`: the other warpgroup's sums.
__device__ __forceinline__ void write_part(const PartsParams& params, const Part& w, Half& o, const Softmax& softmax,
                                           const float* total, const float* sinks, const float* rotation, int half,
                                           uint32_t staged) {
  const CombineParams& p = params.decode.finish;
  constexpr int kRopeAt = kNopeDim - kHalfChannels - kQuarterChannels;  // in the last quarter of the channels
  constexpr int kBoxBytes = kWarpHeads * kRowBytes;
  const int thread = tile_thread() % kWarpgroupThreads, lane = thread % 32, warp = thread / 32;
  const Place place = place_of(thread);
  const uint32_t boxes = staged + (half * (kWarpgroupThreads / 32) + warp) * kHalfBlocks * kBoxBytes;
  // stmatrix: chunk lane / 8 and the next of row lane % 8
  const uint32_t at = lane % 8 * kRowBytes + (lane / 8 ^ lane % 8) * 16;
  const bool rotated = half == 1 && p.freqs_cis != nullptr;
  float lse[2], inverse[2], factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = place.row + 8 * r;
    const float sum = softmax.total[r] + total[head];
    const bool empty = sum == 0.0f;
    inverse[r] = empty ? 0.0f : 1.0f / sum;
    lse[r] = empty ? INFINITY : finish::natural_lse(softmax.last.unit[r], sum);
    factor[r] = empty ? 0.0f : epilogue::sink_factor(sinks[head], lse[r]);  // infinity minus infinity is NaN
  }
  clear_empty(o, inverse);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
#pragma unroll
      for (int group = 0; group < kQuarterChannels / 32; ++group) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = 4 * group + i;
          float x = o[q][4 * j + 2 * r] * inverse[r] * factor[r];
          float y = o[q][4 * j + 2 * r + 1] * inverse[r] * factor[r];
          if (q == 1 && 8 * j >= kRopeAt && rotated && inverse[r] != 0.0f) {
            const float2 turn = *reinterpret_cast<const float2*>(rotation + 8 * j - kRopeAt + place.column);
            epilogue::rotate_back(x, y, turn.x, turn.y);
          }
          words[i] = epilogue::cvt_bf16x2(x, y);
        }
        const int chunks = q * kQuarterChannels / 8 + 4 * group;
        ptx::stmatrix_x4(boxes + chunks / 8 * kBoxBytes + 8 * r * kRowBytes + (at ^ chunks % 8 * 16), words);
      }
    }
  }
  ptx::fence_proxy_async();
  __syncwarp();
  if (lane == 0)
    ptx::store_box(&params.out, {0, w.first_head + warp * kWarpHeads, half * kHalfBlocks, static_cast<int>(w.token)},
                   boxes);
  ptx::bulk_commit();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = place.row + 8 * r;
    if (half == 0 && place.column == 0 && head < w.heads)
      p.lse[w.token * p.stride_lse_token + (w.first_head + head) * p.stride_lse_head] = lse[r];
  }
}

// The partials of a split, behind which the block has nothing: through the stages of both tiles, where nobody reads any
// more, 1 KB a head of a warp.
__device__ __forceinline__ void write_partial(const DecodeParams& p, const Part& w, Half& o, const Softmax& softmax,
                                              const float* total, int half, uint32_t staged) {
  const int thread = tile_thread() % kWarpgroupThreads, lane = thread % 32;
  const Place place = place_of(thread);
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = place.row + 8 * r;
    const float sum = softmax.total[r] + total[head];
    const bool empty = sum == 0.0f;
    inverse[r] = empty ? 0.0f : 1.0f / sum;
    if (half == 0 && place.column == 0 && head < w.heads)
      *lse_of(p, w, head) = empty ? kMinusInfinity : softmax.last.unit[r] + log2f(sum);
  }
  clear_empty(o, inverse);
  decay_values(o, make_float2(inverse[0], inverse[1]));
  stage_results(o, place, half, staged);
  ptx::fence_proxy_async();
  __syncwarp();
  const int head = thread / 32 * kWarpHeads + lane;
  if (lane < kWarpHeads && head < w.heads)
    ptx::bulk_store(o_of(p, w, head) + half * kHalfChannels,
                    staged + (head * kResultPitch + half * kHalfChannels) * sizeof(float),
                    kHalfChannels * sizeof(float));
  ptx::bulk_commit();
}

// ---- the attending warpgroups ----

// Asks for a part's query; by one thread, when nobody reads the one before any more.
__device__ __forceinline__ void ask_for_q(const PartsParams& params, const Part& part, PartsMemory& shared) {
  const uint32_t full = ptx::shared_address(&shared.q_full), q = ptx::shared_address(shared.q);
  ptx::mbarrier_arrive_expect(full, kTileBytes);
  ptx::load_box(q, &params.q, {0, part.first_head, 0, static_cast<int>(part.token)}, full);
}

// Heads 8 i .. 8 i + 7 of it into the L2: all at once, by all SMs, would keep the tiles waiting.
__device__ __forceinline__ void prefetch_q(const DecodeParams& p, const Part& part, int i) {
  const int head = 8 * i + tile_thread() % kWarpgroupThreads;
  if (head >= min(8 * i + 8, part.heads)) return;
  const auto* q = static_cast<const __nv_bfloat16*>(p.q) + part.token * p.stride_q_token +
                  (part.first_head + head) * p.stride_q_head;
  ptx::prefetch_l2(q, kHeadDim * sizeof(__nv_bfloat16));
}

// Its norm and rotation, in place.
__device__ __forceinline__ void finish_part_q(const DecodeParams& p, const Part& part, query::Position position,
                                              PartsMemory& shared) {
  const uint32_t q = ptx::shared_address(shared.q);
  if (p.query.has_norm) normalise_q(p, part, q, tile_thread());
  if (p.query.freqs_cis != nullptr)
    rotate_q(part, q, query::load_factors<false>(p.query, position, tile_thread() % query::kRopeVectors),
             tile_thread());
  ptx::fence_proxy_async();
  consumers_meet();
}

// What the outputs are multiplied with and rotated by, for a warpgroup that has to wait anyway.
__device__ __forceinline__ void load_epilogue(const DecodeParams& p, const Part& part, PartsMemory& shared) {
  const int thread = tile_thread() % kWarpgroupThreads;
  if (thread < kTileHeads) {
    shared.sinks[thread] = load_sink(p, part, thread);
  } else {
    load_rotation(p.finish, part, thread - kTileHeads, shared.rotation);
  }
}

// Asks for a part's lengths and position, by one thread. They come by way of shared memory: the assembler would wait
// for their loads wherever it waits for another one.
__device__ __forceinline__ void ask_for_coming(const DecodeParams& p, const Part& part, Coming& coming) {
  const auto ask = [](uint32_t& to, const void* from) { ptx::cp_async_4(ptx::shared_address(&to), from); };
  const Lengths lengths = find_lengths(p, part);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (lengths.at[i] != nullptr) ask(coming.lengths[i], lengths.at[i]);
  if (p.query.freqs_cis == nullptr) return;
  const uint32_t* position = query::find_position(p.query, part.token);
  ask(coming.position[0], position);
  if (p.query.positions_are_int64) ask(coming.position[1], position + 1);
}

template <bool kCut>
__device__ __forceinline__ void attend_parts(const PartsParams& params, int half, PartsMemory& shared) {
  const DecodeParams& p = params.decode;
  const uint32_t q_full = ptx::shared_address(&shared.q_full);
  const Attending me(shared, half, static_cast<int>(threadIdx.x));
  const auto leads = [] { return tile_thread() % kWarpgroupThreads == 0; };
  uint32_t at = ptx::ctaid_x();
  uint32_t before = 0;  // tiles of earlier parts
  // By all threads: the part at `at` is the first one, or the one before has no tiles.
  const auto ask_at_once = [&] {
    if (leads() && half == 0) {
      ask_for_coming(p, part_at<kCut>(p, kTileHeads, at), shared.coming);
      ask_for_q(params, part_at<kCut>(p, kTileHeads, at), shared);
      ptx::cp_async_wait();
    }
    consumers_meet();
  };
  ask_at_once();
#pragma unroll 1
  for (uint32_t turn = 0;; ++turn) {
    const auto next = [&] { return part_at<kCut>(p, kTileHeads, at + gridDim.x); };
    const auto more = [&] { return at + gridDim.x < params.num_parts; };
    int tiles;
    {
      const Part part = part_at<kCut>(p, kTileHeads, at);
      const RowLengths lengths = {static_cast<int>(shared.coming.lengths[0]),
                                  static_cast<int>(shared.coming.lengths[1])};
      const query::Position position = {shared.coming.position[0], shared.coming.position[1]};
      const BlockRange range = my_work(p, part, find_lengths(p, part), lengths).range;
      // Of a shuffle the assembler knows that it is the same in all lanes.
      tiles = __shfl_sync(kAllLanes, range.end - range.begin, 0);
      ptx::mbarrier_wait(q_full, turn & 1);
      finish_part_q(p, part, position, shared);
    }
    if (tiles <= 0) {
      const Part part = part_at<kCut>(p, kTileHeads, at);
      write_empty_part(p, part, !kCut || part.whole, tile_thread() % 32, tile_thread() / 32, kConsumerWarps);
    } else {
      const auto empty_last_stage = [&] {
        if (before == 0) return;
        ptx::bulk_wait_read();
        me.release(static_cast<int>((before - 1) & 1));
      };
      Half o = {};  // the first tile's decay is 0, and 0 times what a register held may be NaN
      Softmax softmax;
      int own = half ^ static_cast<int>(before & 1);
      uint32_t parity = (before + own) >> 1 & 1;
      if (own > 0) {
        empty_last_stage();
        if (more() && leads()) ask_for_coming(p, next(), shared.coming);
        load_epilogue(p, part_at<kCut>(p, kTileHeads, at), shared);
      }
      // A round has the other warpgroup's tile, which the one that has the first tile has none of at first, and the
      // next one, its own, which one of them has none of at last. `parity`: of its own stage.
#pragma unroll 1
      for (; own <= tiles; own += 2) {
        uint32_t weights[kWeightRegs];
        if (own > 0) {
          me.follow_other(o, softmax, me.parity_there(parity));
          // The other warpgroup has scored the last tile. Before that it waited until this one, all its warps, had
          // measured the tile before: nobody reads Q any more.
          if (own == tiles && more() && leads()) ask_for_q(params, next(), shared);
          me.add_other(o, weights, me.parity_there(parity));
        }
        if (own < tiles) {
          float s[kScoreRegs] = {};
          me.score_own(s, o, weights, own > 0, parity, [&] {
            if (own == 0) empty_last_stage();
          });
          me.add_own(o, weights, me.weigh(weights, softmax, s, p.scale_log2));
        }
        if (more()) prefetch_q(p, next(), own);
        added<0>(o, weights);
        if (own + 1 < tiles) me.release(half);
        parity ^= 1;
      }

#pragma unroll
      for (int r = 0; r < 2; ++r) {
        softmax.total[r] = row_sum(softmax.total[r]);
        if (me.place.column == 0) shared.total[half][me.place.row + 8 * r] = softmax.total[r];
      }
      ptx::cp_async_wait();
      consumers_meet();
      before += static_cast<uint32_t>(tiles);
      const Part part = part_at<kCut>(p, kTileHeads, at);
      if (!kCut || part.whole) {
        write_part(params, part, o, softmax, shared.total[me.there], shared.sinks, shared.rotation, half,
                   ptx::shared_address(shared.keys[(before - 1) & 1]));
      } else {
        write_partial(p, part, o, softmax, shared.total[me.there], half, ptx::shared_address(shared.keys));
      }
    }
    if (!more()) break;
    at += gridDim.x;
    if (tiles <= 0) ask_at_once();
  }
  ptx::bulk_wait_read();
}

}  // namespace sgl_dsv4::sm90
