// Where everything lies in the shared memory of a block. Host code too: test/unit/test_decode_sm90.py checks it.
//
// A matrix of n rows (keys or heads) x 512 channels of 16 bits is cut into 8 channel blocks of 64. A channel block is n
// rows of 128 bytes; in each group of 8 rows (1024 bytes) the eight 16-byte chunks of row r stand in the order chunk ^
// (r % 8), the "128-byte swizzle" of wgmma. So lie Q, for every number of heads (with 16 or 32 in another order within
// 64 channels, few_heads.cuh), the keys of 64 heads a block (read along the channels they are K; read across, V), and
// as one such block P of 16 or 32 heads, heads x 64 keys. The keys of 8, 16 or 32 heads stay as the cache has them.
#pragma once

#include <cstdint>

#include "common/cache_layout.h"
#include "common/split_partition.h"
#include "decode/sm90/roles.h"

namespace sgl_dsv4::sm90 {

inline constexpr int kTileKeys = kSplitBlockKeys;
inline constexpr int kTileHeads = 64;
inline constexpr int kStages = 2;
inline constexpr int kBlockChannels = 64;
inline constexpr int kChannelBlocks = kHeadDim / kBlockChannels;
inline constexpr int kHalfBlocks = kChannelBlocks / 2;
inline constexpr int kRowBytes = kBlockChannels * 2;  // of one row in a channel block
inline constexpr int kGroupBytes = 8 * kRowBytes;     // 8 rows: one period of the swizzle
inline constexpr int kBlockBytes = 64 * kRowBytes;    // 64 rows x 64 channels
inline constexpr int kTileBytes = kChannelBlocks * kBlockBytes;
static_assert(kTileKeys == 64 && kRowBytes == 128 && kBlockBytes == 8192 && kTileBytes == 65536);

// Byte offset of (row, channel) in a tile of 64 rows.
SGL_DSV4_HOST_DEVICE constexpr int tile_offset(int row, int channel) {
  const int chunk = channel % kBlockChannels / 8;
  return channel / kBlockChannels * kBlockBytes + row * kRowBytes + (chunk ^ row % 8) * 16 + channel % 8 * 2;
}

// The same in Q of `heads` heads, 8 or 64.
SGL_DSV4_HOST_DEVICE constexpr int q_offset(int head, int channel, int heads) {
  const int chunk = channel % kBlockChannels / 8;
  return channel / kBlockChannels * heads * kRowBytes + head * kRowBytes + (chunk ^ head % 8) * 16 + channel % 8 * 2;
}

// PTX ISA, "matrix descriptor": start address, leading and stride byte offsets in units of 16 bytes, swizzle mode 1
// (128 bytes). Stride: between groups of 8 rows. Leading: between channel blocks of 64 rows, used only by an operand
// that is read across.
SGL_DSV4_HOST_DEVICE constexpr uint64_t operand_descriptor(uint32_t address) {
  return (address & 0x3ffffu) >> 4 | static_cast<uint64_t>(kBlockBytes >> 4) << 16 |
         static_cast<uint64_t>(kGroupBytes >> 4) << 32 | static_cast<uint64_t>(1) << 62;
}
// What moves a descriptor by `bytes`. Within 128 bytes of a row the swizzle is applied to the moved address.
SGL_DSV4_HOST_DEVICE constexpr uint64_t descriptor_step(int bytes) {
  return static_cast<uint64_t>(bytes >> 4);
}

// Results lie in shared memory, as fp32 and not yet divided by their sums, before they are written: one head a row. The
// pitch of 8 words modulo the 32 banks suits stores of two columns by four lanes, eight rows at a time.
inline constexpr int kResultPitch = kHeadDim + 8;

// The ring of raw rows: each gathering thread has its own 16 bytes of every slot. Nine slots, a whole row, are slower
// by up to 0.6 us: the first tile's copies then keep Q's waiting.
inline constexpr int kRing = 6;
inline constexpr int kRingSlotBytes = kGatherThreads * 16;

// mbarriers, of a stage. A tile has two halves of 256 channels. Parities are those of the stage's use.
struct Barriers {
  uint64_t full[kStages][2];
  uint64_t empty[kStages][2];
  uint64_t measured[kStages];
  uint64_t weighed[kStages];
};

// Of two heads, in log2: the largest score so far, and the unit of the last tile (consume.cuh).
struct alignas(16) Measured {
  float top[2];
  float unit[2];
};

// What the warpgroups share of a block's tiles, 64 heads.
struct TileMemory {
  uint8_t q[kTileBytes];              // 64 heads; heads past the last are zeros
  uint8_t keys[kStages][kTileBytes];  // 64 keys each; keys that are not attended are zeros. Later, results
  uint8_t weights[kBlockBytes];       // P of a tile, 64 heads x 64 keys of bf16 (attend.cuh)
  uint8_t ring[kRing][kRingSlotBytes];
  Measured measured[kStages][kTileHeads / 2];
  uint32_t attended[kStages][kTileKeys / 8];  // word w: bit 4 i belongs to key 8 w + i
  Barriers barriers;
};

// A block that has one part.
struct alignas(1024) SharedMemory : TileMemory {
  float total[kTileHeads];    // the sums of the weights of warpgroup 1's tiles
  float inverse[kTileHeads];  // of a head's sum of weights; 0: it has none
  float factor[kTileHeads];   // of the sink
  float rotation[kRopeDim];   // (cos, sin) of the row's position
};
static_assert(sizeof(SharedMemory) <= 227 * 1024);

// What is asked for before a part's turn.
struct Coming {
  uint32_t lengths[2];   // of the lists
  uint32_t position[2];  // low and, of an int64, high word
};

// A block that takes one part after the other (many_parts.cuh).
struct alignas(1024) PartsMemory : TileMemory {
  float total[2][kTileHeads];  // the sums of the weights of each warpgroup's tiles
  float sinks[kTileHeads];     // in the natural log; -inf: none
  float rotation[kRopeDim];    // (cos, sin) of the row's position
  Coming coming;
  uint64_t q_full;
};
static_assert(sizeof(PartsMemory) <= 227 * 1024);
static_assert(kTileHeads * kResultPitch * 4 <= kStages * kTileBytes + kBlockBytes);

// ---- 8, 16 or 32 heads: raw tiles ----

// Results, with O transposed: a pitch of 4 words modulo 32 suits stores of eight channels by four pairs of heads.
inline constexpr int kRawResultPitch = kHeadDim + 4;
inline constexpr int kScorePitch = kTileKeys + 4;

inline constexpr int kRawStages = 4;
inline constexpr int kRawRowBytes = V4Layout::kDataBytes;
inline constexpr int kRopeChunk = V4Layout::kRopeOffset / 16;
inline constexpr int kCopyKeys = kTileKeys / kCopyWarps;  // of a copying warp

// Byte offset of 16-byte chunk `chunk` of row `key` in a tile of raw rows. Rows start at banks 0 and 16 in turn; within
// 64 bytes chunks are exchanged so that the same chunk of eight neighbouring rows hits all banks.
SGL_DSV4_HOST_DEVICE constexpr int raw_offset(int key, int chunk) {
  return key * kRawRowBytes + (chunk & ~3) * 16 + ((chunk ^ key >> 1) & 3) * 16;
}

// Place of key `key` in a row of weights: lane 4 g + c of a product needs keys 8 m + 2 c and the next, for all m, and
// finds them one after the other.
SGL_DSV4_HOST_DEVICE constexpr int weight_place(int key) {
  return key % 8 / 2 * (kTileKeys / 4) + key / 8 * 2 + key % 2;
}

// At a multiple of 128 bytes: elsewhere 64 bytes of a row cross from one line of all banks into the next, and the
// copies take twice the accesses to shared memory (64 rows unsplit, copied by pieces of 64 bytes: 17.7 us instead of
// 15.4).
struct alignas(128) RawTile {
  uint8_t rows[kTileKeys * kRawRowBytes];
  uint8_t scales[kTileKeys][V4Layout::kScaleBytes];
  uint16_t factors[kNumScales + 1][kTileKeys];  // of each group and key, bf16, at weight_place(key)
  alignas(8) uint16_t attended[kCopyWarps];     // bit i of word w: key 16 w + i
  alignas(4) bool large[kWeighWarps];           // the warp has seen a scale that one bf16 cannot hold
  uint8_t boost[kTileKeys];                     // 16 or 32 heads, of keys of a warp with a large scale
};

// Pitches of 4 words modulo 32: scores and results are stored as those of few heads, weights loaded 16 bytes a lane.
// Q at a multiple of 128 bytes: the addresses of the two chunks that a lane loads then differ in one bit.
struct alignas(128) EightHeadsSharedMemory {
  RawTile tiles[kRawStages];
  union {
    struct {
      uint8_t q[kEightHeads * kHeadDim * 2];
      float scores[2][4][kEightHeads][kScorePitch];  // of each quarter of the channels
    };
    float results[kEightHeads][kRawResultPitch];
  };
  uint16_t weights[2][kEightHeads][kTileKeys + 8];  // P as bf16, at weight_place(key)
  float decay[2][kEightHeads];                      // what O is multiplied by before P V is added
  float q_scale[kEightHeads];                       // 2^e, what the head was divided by
  float inverse[kEightHeads];
  float factor[kEightHeads];
  float rotation[kRopeDim];
  uint64_t full[kRawStages];
  uint64_t weights_full[2];
};
static_assert(sizeof(EightHeadsSharedMemory) <= 227 * 1024);

// Q and P are operands of wgmma: blocks of 64 channels, and of the 64 keys. Results replace tiles.
template <int kHeads>
struct alignas(1024) FewHeadsSharedMemory {
  union {
    RawTile tiles[kRawStages];
    float results[kHeads][kRawResultPitch];
  };
  alignas(1024) uint8_t q[kHeads * kHeadDim * 2];
  alignas(1024) uint8_t weights[2][kHeads * kTileKeys * 2];
  float scores[2][kHeads][kScorePitch];  // of each half of the channels
  float decay[2][kHeads];
  float q_scale[kHeads];  // 2^e, what the head was divided by
  float inverse[kHeads];
  float factor[kHeads];
  float rotation[kRopeDim];
  uint64_t full[kRawStages];
  uint64_t weights_full[2];
  int num_tiles;  // of the block
};
static_assert(sizeof(FewHeadsSharedMemory<16>) <= 227 * 1024 && sizeof(FewHeadsSharedMemory<32>) <= 227 * 1024);

// Blocks that take one part after the other (few_parts.cuh). Before a part's tiles comes its query, in the place of
// their rows; behind the last part one of no tiles.
struct Label {
  uint32_t part;
  int tiles;
};

// Where, in a head's row of 64 channels of outputs on their way, its 16-byte chunk `chunk` stands: eight channel pairs
// of four pairs of heads hit all banks, and so do the chunks of a head.
SGL_DSV4_HOST_DEVICE constexpr int output_chunk(int head, int chunk) {
  return chunk ^ head / 2 % 4 * 2;
}

template <int kHeads>
struct PartsTile : RawTile {
  alignas(16) float rotation[kRopeDim];  // with the query and with the last tile: (cos, sin) of the row's position
  float sinks[kHeads];                   // with the last tile: in the natural log; -inf: none
  Label label;                           // with the query
};

// What a part's values are to be multiplied by: of a head's sum of weights, and of the sink.
template <int kHeads>
struct PartEnds {
  float inverse[kHeads];
  float factor[kHeads];
};

struct alignas(128) EightPartsMemory {
  PartsTile<kEightHeads> tiles[kRawStages];
  uint8_t q[2][kEightHeads * kHeadDim * 2];  // of parts in turn
  float scores[2][4][kEightHeads][kScorePitch];
  uint16_t weights[2][kEightHeads][kTileKeys + 8];
  float decay[2][kEightHeads];
  float q_scale[2][kEightHeads];
  PartEnds<kEightHeads> ends[2];
  uint64_t ends_full[2];
  uint64_t full[kRawStages];
  uint64_t weights_full[2];
};
static_assert(sizeof(EightPartsMemory) <= 227 * 1024);

template <int kHeads>
struct alignas(1024) FewPartsMemory {
  uint8_t q[kHeads * kHeadDim * 2];
  alignas(1024) uint8_t weights[2][kHeads * kTileKeys * 2];
  PartsTile<kHeads> tiles[kRawStages];
  float scores[2][kHeads][kScorePitch];
  // On their way: of a value warpgroup, 64 channels of all heads, twice.
  alignas(16) uint8_t outputs[kValueThreads / kWarpgroupThreads][2][kHeads * kRowBytes];
  float decay[2][kHeads];
  // Of parts in turn.
  float q_scale[2][kHeads];
  PartEnds<kHeads> ends[2];
  uint64_t ends_full[2];
  uint64_t full[kRawStages];
  uint64_t weights_full[2];
};
static_assert(sizeof(FewPartsMemory<16>) <= 227 * 1024 && sizeof(FewPartsMemory<32>) <= 227 * 1024);

}  // namespace sgl_dsv4::sm90
