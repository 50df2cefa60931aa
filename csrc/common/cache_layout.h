// Byte layout of one page of the paged KV caches: the only place in C++ that knows these numbers.
// The Python twin is sgl_dsv4_kernels/layout.py; test/unit/test_layout.py compares the two. docs/cache_layout.md has a
// worked address.
#pragma once

#include <cstdint>

namespace sgl_dsv4 {

inline constexpr int kHeadDim = 512;                       // one latent row: nope part, then rope part
inline constexpr int kRopeDim = 64;                        // rotated tail: 32 (real, imaginary) pairs
inline constexpr int kNopeDim = kHeadDim - kRopeDim;       // 448
inline constexpr int kQuantGroup = 64;                     // values that share one scale byte
inline constexpr int kNumScales = kNopeDim / kQuantGroup;  // 7

// The codes are part of the torch op schemas: never renumber.
enum class CacheLayout : int { kV4 = 0, kBf16 = 1 };

// V4, "584 bytes a token": n rows of [448 e4m3 | 64 bf16], then n x 8 scale bytes (7 UE8M0, the eighth never written),
// then padding up to a multiple of 576.
struct V4Layout {
  static constexpr int kDataBytes = kNopeDim + kRopeDim * 2;  // 576
  static constexpr int kRopeOffset = kNopeDim;                // within a data row
  static constexpr int kScaleBytes = 8;
  static constexpr int kPageAlign = 576;
};
static_assert(V4Layout::kDataBytes == 576 && V4Layout::kDataBytes % 64 == 0);

// Plain bf16 rows, no scales, no padding.
struct Bf16Layout {
  static constexpr int kDataBytes = kHeadDim * 2;  // 1024
  static constexpr int kScaleBytes = 0;
  static constexpr int kPageAlign = 1;
};

constexpr int data_bytes(CacheLayout layout) {
  return layout == CacheLayout::kV4 ? V4Layout::kDataBytes : Bf16Layout::kDataBytes;
}
constexpr int scale_bytes(CacheLayout layout) {
  return layout == CacheLayout::kV4 ? V4Layout::kScaleBytes : Bf16Layout::kScaleBytes;
}
constexpr int page_align(CacheLayout layout) {
  return layout == CacheLayout::kV4 ? V4Layout::kPageAlign : Bf16Layout::kPageAlign;
}
// Offset of a page's scale bytes from the page's first byte.
constexpr int64_t scale_offset(CacheLayout layout, int64_t page_size) {
  return page_size * data_bytes(layout);
}
// Bytes of one page of `page_size` tokens; a page stride may be larger (packed pools).
constexpr int64_t page_bytes(CacheLayout layout, int64_t page_size) {
  const int64_t used = page_size * (data_bytes(layout) + scale_bytes(layout));
  const int64_t align = page_align(layout);
  return (used + align - 1) / align * align;
}
static_assert(page_bytes(CacheLayout::kV4, 256) == 149760 && page_bytes(CacheLayout::kV4, 128) == 74880);
static_assert(page_bytes(CacheLayout::kV4, 64) == 37440 && page_bytes(CacheLayout::kV4, 2) == 1728);
static_assert(page_bytes(CacheLayout::kBf16, 1) == 1024);

}  // namespace sgl_dsv4
