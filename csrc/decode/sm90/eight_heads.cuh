// 8 heads a block: a tile's rows stay in shared memory as the cache has them, and both products take their operands
// from there through registers (mma.sync), so that a code is moved three times instead of five and nothing is padded.
//
//   4 copying warps      index lists -> rows -> cp.async -> tiles[stage]                           | full[stage]
//   16 attending warps   S^T = K Q^T of tile t + 1: warp 4 w + i has channels 128 w .. 128 w + 127 of keys 16 i ..
//                        16 i + 15 -> scores[w]                                                    | kScoresFull
//   4 weighing warps     scales -> factors of the values; sum over w, softmax: warp i has heads 2 i and 2 i + 1 ->
//                        weights, decay                                                            | weights_full
//   16 attending warps   O^T = O^T decay + V^T P^T of tile t: warp v has channels 32 v .. 32 v + 31 | kEmpty
//
// What attending warps wait for are mbarriers, so that each goes on as soon as it can: full[stage],
// weights_full[buffer]. What they signal are hardware barriers, where an arrival costs one instruction a warp:
// kScoresFull + buffer, kEmpty + stage. Every thread of a role arrives, and who reads what another role has written has
// waited for that role itself: compute-sanitizer follows neither a lane that arrives for its warp nor an order that
// goes through a third role. scores, weights and decay exist twice: those of tile t + 2 come behind the values of
// tile t, for which an attending warp has passed weights_full and a weighing one passes kScoresFull.
//
// Scores. The codes become fp16 by one instruction for two, exact, NaN included. Q becomes fp16 too: each head is
// divided by the power of two that brings its largest value to [2^14, 2^15), so values down to 2^-29 of the largest
// keep their eight bits (e within -100 .. 112: below 2^-86 it stays smaller). Scales multiply the sums of their 64
// channels, in fp32. The RoPE part stays bf16.
//
// Values. The codes are placed in bf16 as dequant.cuh says, without their product with the scale: 2^(e - 7) multiplies
// the weights instead, which is exact. What is summed up in fp32 is code x scale x weight. Scales above the largest
// that one bf16 can hold get their second factor at the codes, as there.
//
// A lane's operand of an m16n8k16 product is two neighbouring values each of rows g and g + 8 (lane = 4 g + c) and two
// more 8 columns on. For the scores these are keys and channels, and which channels does not matter as long as Q has
// the same: a lane takes 16 consecutive bytes of a row. For the values they are channels and keys: transposed,
// ldmatrix gives a lane two neighbouring codes of two neighbouring keys, which become operands of the even and of the
// odd channel.
//
// Not for 16 or 32 heads (few_heads.cuh): the operands that Q and P are here would take that many more registers and
// loads from shared memory, for every 8 heads (docs/decode_pipeline.md has what was tried).
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ptx.cuh"
#include "decode/sm90/consume.cuh"
#include "decode/sm90/dequant.cuh"
#include "decode/sm90/output.cuh"
#include "decode/sm90/raw_tiles.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

template <typename SharedMemory = EightHeadsSharedMemory>
struct EightHeads {
  using Shared = SharedMemory;
  static constexpr int kBlockHeads = kEightHeads;
  static constexpr bool kEmptyApart = false;
  static constexpr int kCopyRegisters = kEightCopyRegisters, kWeighRegisters = kEightWeighRegisters;

  static constexpr int kWarpChannels = kHeadDim / kAttendWarps;  // of the values
  static constexpr int kPieces = kWarpChannels / 16;             // products' rows
  static constexpr int kQuarters = 4;                            // of the channels, of the scores
  static constexpr int kQuarterBytes = 128;  // of a row: two groups of codes; the last: one and RoPE
  static constexpr int kWeighHeads = kEightHeads / kWeighWarps;
  static constexpr int kHeadLanes = 32 / kWeighHeads;
  static constexpr int kLaneKeys = kTileKeys / kHeadLanes;
  static_assert(kWarpChannels == 32 && kQuantGroup % kWarpChannels == 0 && kAttendWarps == 4 * kQuarters);

  static constexpr int kScoresThreads = kAttendThreads + kWeighWarps * 32;  // of a barrier between these roles

  // ---- weighing ----

  // A warp's two heads at once, 16 lanes each, of which lane l has keys 4 l .. 4 l + 3.
  struct Softmax {
    float top = kMinusInfinity, unit = kMinusInfinity, total = 0.0f;

    __device__ __forceinline__ void weigh(Shared& shared, const Turn& turn, int head, int lane, float scale) {
      const int buffer = turn.buffer(), key = lane * kLaneKeys;
      float4 part[kQuarters];
#pragma unroll
      for (int j = 0; j < kQuarters; ++j)
        part[j] = *reinterpret_cast<const float4*>(&shared.scores[buffer][j][head][key]);
      const uint32_t attended = shared.tiles[turn.stage].attended[key / kCopyKeys] >> key % kCopyKeys;
      float s[kLaneKeys];
      s[0] = attended & 1 ? ((part[0].x + part[1].x) + (part[2].x + part[3].x)) * scale : kMinusInfinity;
      s[1] = attended & 2 ? ((part[0].y + part[1].y) + (part[2].y + part[3].y)) * scale : kMinusInfinity;
      s[2] = attended & 4 ? ((part[0].z + part[1].z) + (part[2].z + part[3].z)) * scale : kMinusInfinity;
      s[3] = attended & 8 ? ((part[0].w + part[1].w) + (part[2].w + part[3].w)) * scale : kMinusInfinity;
      const float most = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
      const float decay = next_unit(lanes_max<kHeadLanes>(most), top, unit);
      const float base = base_of(unit);
      float sum = 0.0f;
      const uint32_t weights = ptx::shared_address(shared.weights[buffer][head]);
#pragma unroll
      for (int i = 0; i < kLaneKeys; i += 2) {
        const float w0 = ptx::ex2(s[i] - base), w1 = ptx::ex2(s[i + 1] - base);
        sum += w0 + w1;
        ptx::st_shared(weights + weight_place(key + i) * 2, ptx::cvt_bf16x2(w0, w1));
      }
      total = fmaf(total, decay, sum);
      if (lane == 0) shared.decay[buffer][head] = decay;
    }
  };
  static_assert(kLaneKeys == 4 && kTileKeys == kWeighWarps * 16);

  // A lane has half of a key's scales.
  __device__ __forceinline__ static void store_factors(RawTile& tile, int warp, int lane) {
    const int key = warp * kWeighKeys + lane / 2, first = lane % 2 * 4;
    const uint32_t scales = *reinterpret_cast<const uint32_t*>(&tile.scales[key][first]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      tile.factors[first + i][weight_place(key)] =
          static_cast<uint16_t>(scale_pair(min(scales >> 8 * i & 0xffu, kLargestSingleScale)));
    const bool large =
        __any_sync(kAllLanes, has_large_scale(first == 0 ? make_uint2(scales, 0) : make_uint2(0, scales)));
    if (lane == 0) tile.large[warp] = large;
  }

  // Writes the LSEs and leaves in shared memory what the values are to be multiplied by. Returns as copy_tiles().
  template <bool kPairs>
  __device__ __forceinline__ static bool weigh_tiles(const DecodeParams& p, const Part& part, const Lengths& lengths_at,
                                                     Shared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = weigh_warp();
    const Work w = my_work(p, part, lengths_at, load(lengths_at));
    if (w.range.empty()) return false;
    const int head = warp * kWeighHeads + lane / kHeadLanes, head_lane = lane % kHeadLanes;
    Softmax softmax;
    const int tiles = w.range.end - w.range.begin;
#pragma unroll 1
    for (Turn turn; turn.tile < tiles; turn.advance()) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[turn.stage]), turn.stage_parity);
      store_factors(shared.tiles[turn.stage], warp, lane);
      ptx::bar_sync(kScoresFull + turn.buffer(), kScoresThreads);
      softmax.weigh(shared, turn, head, head_lane, p.scale_log2);
      ptx::mbarrier_arrive(ptx::shared_address(&shared.weights_full[turn.buffer()]));
      if (turn.tile + kRawStages < tiles) ptx::bar_arrive(kEmpty + turn.stage, kRawThreads);
    }
    const float total = lanes_sum<kHeadLanes>(softmax.total);
    if (head_lane == 0)
      finish_head(p, w, kPairs ? Ends::kPairs : ends_of(p.o_accum != nullptr), head, softmax.unit, total,
                  load_sink(p, w, head), shared);
    return true;
  }

  // ---- the query ----

  // Its norm and rotation, where they are asked for; then divided by 2^e, and to fp16 but for the RoPE part. To Q at
  // `q`.
  __device__ __forceinline__ static void store_head(const DecodeParams& p, query::Values (&values)[1],
                                                    const query::Factors& factors, uint32_t q, float* q_scale, int head,
                                                    int lane) {
    constexpr int kLast = query::kVectors - 1;
    const bool rope = lane >= query::kFirstRopeLane;
    query::Values& v = values[0];
    if (p.query.has_norm) query::normalise(values, p.query.eps);
    if (p.query.freqs_cis != nullptr && rope) query::rotate(v.vector[kLast], factors);

    const int e = min(max(largest_exponent(v) - 14, -100), 112);
    const float down = power_of_two(-e);
#pragma unroll
    for (int i = 0; i < query::kVectors; ++i) {
#pragma unroll
      for (uint32_t& word : v.vector[i].word) {
        const float2 x = unpack_bf16(word);
        const float low = x.x * down, high = x.y * down;
        word = i == kLast && rope ? ptx::cvt_bf16x2(low, high) : ptx::cvt_f16x2(low, high);
      }
      st_query(q + q_offset(head, (32 * i + lane) * query::kVec, kEightHeads), v.vector[i]);
    }
    if (lane == 0) q_scale[head] = power_of_two(e);
  }

  // ---- scores ----

  // Q of half a quarter of the channels as a lane's operands: four products of 16 channels, in the order in which the
  // lane has those of a row.
  using Query = uint32_t[4][2];

  // `address`: of the lane's first eight channels of head g. The address of the other eight differs in one bit,
  // `other`.
  __device__ __forceinline__ static void load_half(Query& q, uint32_t address, uint32_t other) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 v = ptx::ld_shared(i == 0 ? address : address ^ other);
      q[2 * i][0] = v.x;
      q[2 * i][1] = v.y;
      q[2 * i + 1][0] = v.z;
      q[2 * i + 1][1] = v.w;
    }
  }

  // Where a lane has its operands.
  struct QueryPlace {
    uint32_t half[2], other;  // other: of the second half

    __device__ __forceinline__ QueryPlace(const Shared& shared, int quarter, int lane) {
      const int g = lane / 4, part = lane % 4;
      const bool rope = quarter == kQuarters - 1;
      const uint32_t at = ptx::shared_address(&shared.q);
      half[0] = at + q_offset(g, quarter * 2 * kQuantGroup + part * 16, kEightHeads);
      half[1] = rope ? at + q_offset(g, kNopeDim + part * 8, kEightHeads) : half[0] + kEightHeads * kRowBytes;
      other = rope ? kRowBytes / 2 : 16;
      ptx::keep(half[0]);
      ptx::keep(half[1]);
      ptx::keep(other);
    }
  };

  // `at`: where Q is, from the first one on.
  __device__ __forceinline__ static void load_query(Query (&q)[2], const QueryPlace& place, uint32_t at = 0) {
    load_half(q[0], place.half[0] + at, 16);
    load_half(q[1], place.half[1] + at, place.other);
  }

  // The sums of a group of 64 channels: `upper`, `lower` a lane's 16 codes of keys g and g + 8.
  __device__ __forceinline__ static void add_codes(float (&s)[4], const uint4& upper, const uint4& lower,
                                                   const Query& q) {
    const uint32_t up[4] = {upper.x, upper.y, upper.z, upper.w}, low[4] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      ptx::mma_f16(s, ptx::low_e4m3x2_to_f16x2(up[j]), ptx::low_e4m3x2_to_f16x2(low[j]),
                   ptx::high_e4m3x2_to_f16x2(up[j]), ptx::high_e4m3x2_to_f16x2(low[j]), q[j][0], q[j][1]);
  }
  // Of half of the RoPE part.
  __device__ __forceinline__ static void add_rope(float (&s)[4], const uint4& upper, const uint4& lower,
                                                  const uint32_t (*q)[2]) {
    ptx::mma_bf16(s, upper.x, lower.x, upper.y, lower.y, q[0][0], q[0][1]);
    ptx::mma_bf16(s, upper.z, lower.z, upper.w, lower.w, q[1][0], q[1][1]);
  }

  // A lane's places in the first tile and the first buffer.
  struct ScorePlace {
    uint32_t row;     // its 16 bytes of the first group, of key g
    uint32_t scale;   // its scale: of key lane % 16 in the first or second group
    uint32_t scores;  // of head 2 c and key g
    bool has_rope;    // instead of the second group
    bool scale_is_one;

    __device__ __forceinline__ ScorePlace(const Shared& shared, int warp, int lane) {
      const int quarter = warp / 4, first_key = warp % 4 * 16;
      const int key = first_key + lane % 16, group = 2 * quarter + lane / 16;
      const auto& tile = shared.tiles[0];
      row = ptx::shared_address(tile.rows) + raw_offset(first_key + lane / 4, lane % 4) + quarter * kQuarterBytes;
      scale = ptx::shared_address(&tile.scales[key][group]);
      scores = ptx::shared_address(&shared.scores[0][quarter][lane % 4 * 2][first_key + lane / 4]);
      has_rope = quarter == kQuarters - 1;
      scale_is_one = group == kNumScales;
      ptx::keep(row);
      ptx::keep(scale);
      ptx::keep(scores);
    }
  };

  // A warp's share of the scores of a tile. `q_scale`: of heads 2 c and 2 c + 1.
  __device__ __forceinline__ static void add_scores(const Query (&q)[2], float2 q_scale, Shared& shared,
                                                    const ScorePlace& place, const Turn& turn, int lane) {
    constexpr int kLower = 8 * kRawRowBytes;
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[turn.stage]), turn.stage_parity);
    const uint32_t row = place.row + turn.tile_at(shared);
    const uint4 upper0 = ptx::ld_shared(row), lower0 = ptx::ld_shared(row + kLower);
    const uint32_t byte = ptx::ld_shared_8(place.scale + turn.tile_at(shared));
    const uint4 upper1 = ptx::ld_shared(row + 64), lower1 = ptx::ld_shared(row + kLower + 64);

    const uint32_t e = place.scale_is_one ? 127 : byte;
    const float scale = e == 255 ? NAN : __uint_as_float(max(e << 23, 0x00400000u));  // 2^(e - 127), subnormal for 0
    float scales[2][2];  // of key g or g + 8, first or second group
#pragma unroll
    for (int i = 0; i < 4; ++i) scales[i % 2][i / 2] = __shfl_sync(kAllLanes, scale, lane / 4 + 8 * i);

    float first[4] = {}, second[4] = {};
    add_codes(first, upper0, lower0, q[0]);
    if (!place.has_rope) {
      add_codes(second, upper1, lower1, q[1]);
    } else {
      const uint4 upper2 = ptx::ld_shared(row + 128), lower2 = ptx::ld_shared(row + kLower + 128);
      add_rope(second, upper1, lower1, q[1]);
      add_rope(second, upper2, lower2, q[1] + 2);
    }
    const uint32_t scores = place.scores + turn.buffer() * sizeof(shared.scores[0]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Q's scale first: with the key's, a sum of 2^29 could be infinite.
      const float down = i % 2 == 0 ? q_scale.x : q_scale.y;
      ptx::st_shared(scores + (i % 2 * kScorePitch + i / 2 * 8) * sizeof(float),
                     fmaf(first[i] * down, scales[i / 2][0], second[i] * down * scales[i / 2][1]));
    }
    ptx::bar_arrive(kScoresFull + turn.buffer(), kScoresThreads);
  }

  // ---- values ----

  // What the scales of keys k and k + 1 are more than the largest single one.
  __device__ __forceinline__ static uint32_t second_pair(const RawTile& tile, int group, int k) {
    uint32_t pair = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t e = tile.scales[k + i][group];
      pair |= (e <= kLargestSingleScale ? kOneBf16 : second_scale_pair(e) & 0xffffu) << 16 * i;
    }
    return pair;
  }

  // The group of a warp's channels; kNumScales: the RoPE part.
  __device__ __forceinline__ static int value_group(int warp) { return warp * kWarpChannels / kQuantGroup; }

  // A lane's places in the first tile and the first buffer.
  struct ValuePlace {
    uint32_t rows[kPieces];  // where the row of a matrix begins that it names
    uint32_t factors;        // of its keys
    uint32_t weights;        // of head g, its keys
    uint32_t decay;          // of heads 2 c and 2 c + 1
    uint32_t large;
    int group;  // of codes

    __device__ __forceinline__ bool has_codes() const { return group < kNumScales; }

    __device__ __forceinline__ ValuePlace(const Shared& shared, int warp, int lane) {
      const auto& tile = shared.tiles[0];
      group = value_group(warp);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        // Codes: matrix m of four has keys 8 m .. 8 m + 7 of 16 channels. RoPE: eight channels and the next eight of
        // eight keys, then of the next eight.
        const int row = has_codes() ? lane : lane / 16 * 8 + lane % 8;
        const int chunk =
            has_codes() ? warp * kPieces + piece : kRopeChunk + (warp * kPieces % 4 + piece) * 2 + lane / 8 % 2;
        rows[piece] = ptx::shared_address(tile.rows) + raw_offset(row, chunk);
        ptx::keep(rows[piece]);
      }
      factors = ptx::shared_address(tile.factors[group]) + lane % 4 * (kTileKeys / 4) * 2;
      weights = ptx::shared_address(shared.weights[0][lane / 4]) + lane % 4 * (kTileKeys / 4) * 2;
      decay = ptx::shared_address(&shared.decay[0][lane % 4 * 2]);
      large = ptx::shared_address(tile.large);
      ptx::keep(factors);
      ptx::keep(weights);
      ptx::keep(decay);
    }
  };

  // 16 values for 16 keys of a lane.
  __device__ __forceinline__ static void load_pairs(uint32_t (&pairs)[8], uint32_t address) {
    const uint4 first = ptx::ld_shared(address), second = ptx::ld_shared(address + 16);
    pairs[0] = first.x, pairs[1] = first.y, pairs[2] = first.z, pairs[3] = first.w;
    pairs[4] = second.x, pairs[5] = second.y, pairs[6] = second.z, pairs[7] = second.w;
  }

  __device__ __forceinline__ static void wait_for_weights(Shared& shared, const Turn& turn) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.weights_full[turn.buffer()]), turn.buffer_parity());
  }

  // P of the tile as a lane's operands, and the decay of O before it.
  __device__ __forceinline__ static void load_weights(uint32_t (&weights)[8], float (&o)[kPieces][4],
                                                      const Shared& shared, const ValuePlace& place, const Turn& turn) {
    load_pairs(weights, place.weights + turn.buffer() * sizeof(shared.weights[0]));
    const float2 decay = ptx::ld_shared_float2(place.decay + turn.buffer() * sizeof(shared.decay[0]));
#pragma unroll
    for (int i = 0; i < kPieces * 4; ++i) o[i / 4][i % 4] *= i % 2 == 0 ? decay.x : decay.y;
  }

  __device__ __forceinline__ static void add_code_values(float (&o)[kPieces][4], Shared& shared,
                                                         const ValuePlace& place, const Turn& turn, int lane) {
    uint32_t a[kPieces][4][4];  // 16 channels x 16 keys
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const uint4 v = ptx::ldmatrix_trans(place.rows[piece] + turn.tile_at(shared) + half * 32 * kRawRowBytes);
        const uint32_t codes[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t (&four)[4] = a[piece][2 * half + i / 2];
          four[i % 2 * 2] = even_channel(codes[i]);
          four[i % 2 * 2 + 1] = odd_channel(codes[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPieces * 16; ++i) ptx::keep(a[i / 16][i / 4 % 4][i % 4]);  // before the wait for the weights
    wait_for_weights(shared, turn);
    if (ptx::ld_shared_32(place.large + turn.tile_at(shared)) != 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t factor = second_pair(shared.tiles[turn.stage], place.group, 8 * i + lane % 4 * 2);
#pragma unroll
        for (int j = 0; j < kPieces * 2; ++j) {
          uint32_t& values = a[j / 2][i / 2][i % 2 * 2 + j % 2];
          values = ptx::mul_bf16x2(values, factor);
        }
      }
    }
    uint32_t b[8], factors[8];
    load_pairs(factors, place.factors + turn.tile_at(shared));
    load_weights(b, o, shared, place, turn);
#pragma unroll
    for (int i = 0; i < 8; ++i) b[i] = ptx::mul_bf16x2(b[i], factors[i]);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const uint32_t (&four)[4] = a[piece][k];
        ptx::mma_bf16(o[piece], four[0], four[1], four[2], four[3], b[2 * k], b[2 * k + 1]);
      }
    }
  }

  __device__ __forceinline__ static void add_rope_values(float (&o)[kPieces][4], Shared& shared,
                                                         const ValuePlace& place, const Turn& turn) {
    wait_for_weights(shared, turn);
    uint32_t b[8];
    load_weights(b, o, shared, place, turn);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const uint4 v = ptx::ldmatrix_trans(place.rows[piece] + turn.tile_at(shared) + k * 16 * kRawRowBytes);
        ptx::mma_bf16(o[piece], v.x, v.y, v.z, v.w, b[2 * k], b[2 * k + 1]);
      }
    }
  }

  // ---- partials ----
  //
  // Straight from the accumulators. Lanes four apart exchange values, so that each has four channels in a row, and an
  // instruction stores 128 consecutive bytes of four heads; not so of the RoPE part. (8 bytes a lane, without the
  // exchange, took 2 % longer.)

  // Where a lane's values of its first head go: of pieces of codes a lane of odd g has the second, else the first.
  __device__ __forceinline__ static float* find_partials(const DecodeParams& p, const Part& part, int warp, int lane) {
    const int g = lane / 4;
    const bool has_codes = value_group(warp) < kNumScales;
    float* at = o_of(p, part, lane % 4 * 2) + warp * kWarpChannels + (has_codes ? g / 2 * 4 + g % 2 * 16 : g);
    ptx::keep(at);
    return at;
  }

  __device__ __forceinline__ static void store_partials(const DecodeParams& p, const Part& part,
                                                        const float (&o)[kPieces][4], float* first,
                                                        const Shared& shared, int lane, bool has_codes) {
    static_assert(kPieces == 2);
    const int head = lane % 4 * 2;
    ptx::bar_sync(0, kRawThreads);
    const float2 inverse = *reinterpret_cast<const float2*>(&shared.inverse[head]);
    const bool odd = lane & 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float factor = i == 0 ? inverse.x : inverse.y;
      float x[kPieces][2];
#pragma unroll
      for (int j = 0; j < 4; ++j)  // the values of an empty head do not count: 0 times an infinite key is NaN
        x[j / 2][j % 2] = factor == 0.0f ? 0.0f : o[j / 2][i + j % 2 * 2] * factor;
      float* at = first + i * p.stride_o_head;
      if (has_codes) {
        const float2 mine = odd ? make_float2(x[1][0], x[1][1]) : make_float2(x[0][0], x[0][1]);
        const float2 given = odd ? make_float2(x[0][0], x[0][1]) : make_float2(x[1][0], x[1][1]);
        const float2 got = {__shfl_xor_sync(kAllLanes, given.x, 4), __shfl_xor_sync(kAllLanes, given.y, 4)};
        const float4 four = odd ? make_float4(got.x, got.y, mine.x, mine.y) : make_float4(mine.x, mine.y, got.x, got.y);
        if (head + i < part.heads) *reinterpret_cast<float4*>(at) = four;
      } else if (head + i < part.heads) {
#pragma unroll
        for (int j = 0; j < 4; ++j) at[j * 8] = x[j / 2][j % 2];
      }
    }
  }

  // ---- the attending warps ----

  __device__ __forceinline__ static Done attend_tiles(const DecodeParams& p, const Part& part,
                                                      const Lengths& lengths_at, Shared& shared) {
    ptx::setmaxnreg_inc<kEightAttendRegisters>();
    const int warp = my_warp(), lane = static_cast<int>(threadIdx.x) % 32;
    const bool loads_q = warp < kEightHeads;
    const __nv_bfloat16* head_at = find_head(p, part, warp, lane);
    const uint32_t* position_at = query::find_position(p.query, part.token);
    float* const partials = find_partials(p, part, warp, lane);
    const QueryPlace query_place(shared, warp / 4, lane);
    const ScorePlace score_place(shared, warp, lane);
    const ValuePlace value_place(shared, warp, lane);
    ptx::griddepcontrol_wait();

    query::Values head[1] = {load_head(p, head_at)};
    const query::Position position =
        query::load_position(p.query, position_at, loads_q && p.query.freqs_cis != nullptr);
    const RowLengths lengths = load(lengths_at);
    __syncwarp();  // keeps the loads here
    if (loads_q) {
      query::Factors factors = {};
      if (p.query.freqs_cis != nullptr && lane >= query::kFirstRopeLane)
        factors = query::load_factors<false>(p.query, position, lane - query::kFirstRopeLane);
      store_head(p, head, factors, ptx::shared_address(shared.q), shared.q_scale, warp, lane);
    }
    const Work w = my_work(p, part, lengths_at, lengths);
    if (w.range.empty()) return Done::kEmpty;
    if (p.o_accum == nullptr && warp >= kAttendWarps - kRopeDim / 32)
      load_rotation(p.finish, part, static_cast<int>(threadIdx.x) - (kAttendThreads - kRopeDim), shared.rotation);
    ptx::bar_sync(kConsumersMeet, kAttendThreads);

    Query q[2];
    load_query(q, query_place);
    const float2 q_scale = *reinterpret_cast<const float2*>(&shared.q_scale[lane % 4 * 2]);
    float o[kPieces][4] = {};  // the first tile's decay is 0
    const int tiles = w.range.end - w.range.begin;
    Turn scored, added;
#pragma unroll 1
    while (added.tile < tiles) {
      if (scored.tile < tiles) {
        add_scores(q, q_scale, shared, score_place, scored, lane);
        scored.advance();
        if (scored.tile == 1) continue;  // one tile ahead
      }
      if (value_place.has_codes()) {
        add_code_values(o, shared, value_place, added, lane);
      } else {
        add_rope_values(o, shared, value_place, added);
      }
      if (added.tile + kRawStages < tiles) ptx::bar_arrive(kEmpty + added.stage, kRawThreads);
      added.advance();
    }

    if (p.o_accum != nullptr) {
      store_partials(p, part, o, partials, shared, lane, value_place.has_codes());
      return Done::kWritten;
    }
    ptx::bar_sync(kConsumersMeet, kAttendThreads);  // results lie where Q and scores were
    const int g = lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* row = shared.results[column + i] + warp * kWarpChannels + piece * 16;
        if (value_place.has_codes()) {
          *reinterpret_cast<float2*>(row + 2 * g) = make_float2(o[piece][i], o[piece][i + 2]);
        } else {
          row[g] = o[piece][i];
          row[g + 8] = o[piece][i + 2];
        }
      }
    }
    return Done::kStaged;
  }
};

}  // namespace sgl_dsv4::sm90
