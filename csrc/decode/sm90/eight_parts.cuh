// Blocks of 8 heads that take one part after the other (raw_parts.cuh). Roles and products are those of
// eight_heads.cuh: attending warps are one tile ahead with the scores, also where that is the first tile of the next
// part, whose query they have in registers.
//
// barrier            who arrives          what becomes true
// ends_full[part]    weighing threads     inverse and factor of the part's heads are in ends[]; parts in turn
// kAttendWarpsMeet   attending threads    the part's query is in q[]; parts in turn
//
// The others as in eight_heads.cuh, but that every tile and every query is released, also the last. Outputs go from the
// accumulators to memory, 32 bytes of four heads an instruction.
//
// Shared memory, KiB: four stages 152, Q 16, scores 17, P 2. Registers as in eight_heads.cuh.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ptx.cuh"
#include "decode/epilogue.cuh"
#include "decode/query.cuh"
#include "decode/sm90/eight_heads.cuh"
#include "decode/sm90/output.cuh"
#include "decode/sm90/raw_parts.cuh"
#include "decode/sm90/raw_tiles.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

struct EightParts : EightHeads<EightPartsMemory>, RawParts<kEightHeads, EightPartsMemory> {
  using Parts = RawParts<kEightHeads, EightPartsMemory>;
  using Shared = EightPartsMemory;

  // ---- weights ----

  __device__ __forceinline__ static void weigh_parts(const DecodeParams& p, Shared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = weigh_warp();
    const int head = warp * kWeighHeads + lane / kHeadLanes, head_lane = lane % kHeadLanes;
    uint32_t parts = 0;
    int before = 0;  // tiles of the part before
    Turn turn;
#pragma unroll 1
    while (const int tiles = Parts::wait_for_part(turn, shared)) {
      const uint32_t at = shared.tiles[turn.stage].label.part;
      Parts::release_query(turn);
      // Behind a part of one tile the first tile's stage may have had the last but one: its factors have been read when
      // the scores are there.
      bool late = before == 1;
      before = tiles;
      Softmax softmax;
#pragma unroll 1
      for (const int end = turn.tile + tiles; turn.tile < end; turn.advance()) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.full[turn.stage]), turn.stage_parity);
        if (!late) store_factors(shared.tiles[turn.stage], warp, lane);
        ptx::bar_sync(kScoresFull + turn.buffer(), kScoresThreads);
        if (late) store_factors(shared.tiles[turn.stage], warp, lane);
        late = false;
        softmax.weigh(shared, turn, head, head_lane, p.scale_log2);
        ptx::mbarrier_arrive(ptx::shared_address(&shared.weights_full[turn.buffer()]));
        if (turn.tile + 1 == end) {
          const float total = lanes_sum<kHeadLanes>(softmax.total);
          Parts::finish_part(p, at, parts, turn, head, head_lane, softmax.unit, total, shared);
        }
        ptx::bar_arrive(kEmpty + turn.stage, kRawThreads);
      }
      ++parts;
    }
  }

  // ---- the attending warps ----

  // A part's query: a head a warp, by the first of them, then to the registers of all. Q is there twice, so who is
  // still about to load the one before does not mind.
  __device__ __forceinline__ static void take_query(const DecodeParams& p, Query (&q)[2], float2& q_scale,
                                                    const QueryPlace& place, Turn& turn, uint32_t part, int warp,
                                                    int lane, Shared& shared) {
    constexpr int kBytes = sizeof(shared.q[0]);
    if (warp < kEightHeads) {
      const auto& tile = shared.tiles[turn.stage];
      const uint32_t raw = ptx::shared_address(tile.rows) + warp * kHeadDim * 2 + lane * 16;
      query::Values head[1];
#pragma unroll
      for (int v = 0; v < query::kVectors; ++v) {
        const uint4 x = ptx::ld_shared(raw + v * 512);
        head[0].vector[v] = {{x.x, x.y, x.z, x.w}};
      }
      query::Factors factors = {};
      if (p.query.freqs_cis != nullptr && lane >= query::kFirstRopeLane) factors = Parts::query_factors(tile, lane);
      store_head(p, head, factors, ptx::shared_address(shared.q[part & 1]), shared.q_scale[part & 1], warp, lane);
    }
    Parts::release_query(turn);
    ptx::bar_sync(kAttendWarpsMeet, kAttendThreads);
    load_query(q, place, (part & 1) * kBytes);
    q_scale = *reinterpret_cast<const float2*>(&shared.q_scale[part & 1][lane % 4 * 2]);
  }

  // A warp's 32 channels, straight from the accumulators: 32 bytes of four heads an instruction.
  __device__ __forceinline__ static void write_part(const DecodeParams& p, const Part& part,
                                                    const float (&o)[kPieces][4], const PartEnds<kEightHeads>& ends,
                                                    const float2 (&turn)[kPieces], int warp, int lane, bool has_codes) {
    const CombineParams& f = p.finish;
    const int g = lane / 4, column = lane % 4 * 2;
    const bool odd = g % 2 != 0;
    const int channel = has_codes ? 2 * g : Parts::pair_of(g);
    auto* to = static_cast<__nv_bfloat16*>(f.out) + part.token * f.stride_out_token +
               (part.first_head + column) * f.stride_out_head + warp * kWarpChannels + channel;
    const float2 inverses = *reinterpret_cast<const float2*>(ends.inverse + column);
    const float2 factors = *reinterpret_cast<const float2*>(ends.factor + column);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float inverse = i == 0 ? inverses.x : inverses.y, factor = i == 0 ? factors.x : factors.y;
      const bool empty = inverse == 0.0f;  // whatever the values are
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        float x = empty ? 0.0f : o[piece][i] * inverse * factor, y = empty ? 0.0f : o[piece][i + 2] * inverse * factor;
        if (!has_codes) {
          Parts::exchange_pair(x, y, odd);
          if (f.freqs_cis != nullptr && !empty) epilogue::rotate_back(x, y, turn[piece].x, turn[piece].y);
        }
        if (column + i < part.heads)
          *reinterpret_cast<uint32_t*>(to + i * f.stride_out_head + piece * 16) = epilogue::cvt_bf16x2(x, y);
      }
    }
  }

  // The partials of a split, likewise: 64 bytes of four heads.
  __device__ __forceinline__ static void write_partial(const DecodeParams& p, const Part& part,
                                                       const float (&o)[kPieces][4], const PartEnds<kEightHeads>& ends,
                                                       int warp, int lane, bool has_codes) {
    const int g = lane / 4, column = lane % 4 * 2;
    const bool odd = g % 2 != 0;
    const int channel = warp * kWarpChannels + (has_codes ? 2 * g : Parts::pair_of(g));
    const float2 inverses = *reinterpret_cast<const float2*>(ends.inverse + column);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float inverse = i == 0 ? inverses.x : inverses.y;
      const bool empty = inverse == 0.0f;  // whatever the values are
      float* to = o_of(p, part, column + i) + channel;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        float x = empty ? 0.0f : o[piece][i] * inverse, y = empty ? 0.0f : o[piece][i + 2] * inverse;
        if (!has_codes) Parts::exchange_pair(x, y, odd);
        if (column + i < part.heads) *reinterpret_cast<float2*>(to + piece * 16) = make_float2(x, y);
      }
    }
  }

  __device__ __forceinline__ static void attend_parts(const RawPartsParams& params, int warp, Shared& shared) {
    ptx::setmaxnreg_inc<kEightAttendRegisters>();
    const DecodeParams& p = params.decode;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const QueryPlace query_place(shared, warp / 4, lane);
    const ScorePlace score_place(shared, warp, lane);
    const ValuePlace value_place(shared, warp, lane);
    ptx::griddepcontrol_wait();
    Parts::write_empty_parts(params, warp, kAttendWarps);

    Query q[2] = {};
    float2 q_scale = {};
    float o[kPieces][4] = {};
    uint32_t taken = 0, written = 0;  // parts
    uint32_t at = 0, next_at = 0;
    int to_score = 0, to_add = 0, next_tiles = 0;
    Turn scored, added;
#pragma unroll 1
    for (;;) {
      if (to_score == 0) {
        next_tiles = Parts::wait_for_part(scored, shared);
        if (next_tiles != 0) {
          next_at = __shfl_sync(kAllLanes, shared.tiles[scored.stage].label.part, 0);
          take_query(p, q, q_scale, query_place, scored, taken++, warp, lane, shared);
          to_score = next_tiles;
        }
      }
      if (to_score != 0) {
        add_scores(q, q_scale, shared, score_place, scored, lane);
        scored.advance();
        --to_score;
      }
      if (to_add == 0) {  // the first part's first tile has been scored: one tile ahead
        if (next_tiles == 0) break;
        to_add = next_tiles, at = next_at;
        added.skip_stage();
        continue;
      }
      if (value_place.has_codes()) {
        add_code_values(o, shared, value_place, added, lane);
      } else {
        add_rope_values(o, shared, value_place, added);
      }
      const bool last = --to_add == 0;
      float2 turn[kPieces] = {};
      if (last && !value_place.has_codes()) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
          turn[piece] = *reinterpret_cast<const float2*>(shared.tiles[added.stage].rotation + warp * kWarpChannels -
                                                         kNopeDim + piece * 16 + Parts::pair_of(lane / 4));
      }
      ptx::bar_arrive(kEmpty + added.stage, kRawThreads);
      added.advance();
      if (!last) continue;
      ptx::mbarrier_wait(ptx::shared_address(&shared.ends_full[written & 1]), written >> 1 & 1);
      const Part part = part_at<true>(p, kEightHeads, at);
      if (part.whole) {
        write_part(p, part, o, shared.ends[written & 1], turn, warp, lane, value_place.has_codes());
      } else {
        write_partial(p, part, o, shared.ends[written & 1], warp, lane, value_place.has_codes());
      }
      ++written;
#pragma unroll
      for (int i = 0; i < kPieces * 4; ++i) o[i / 4][i % 4] = 0.0f;
      if (next_tiles == 0) break;
      to_add = next_tiles, at = next_at;
      added.skip_stage();
    }
  }
};

}  // namespace sgl_dsv4::sm90
