// Division by a number that is known before the launch. Host and device.
#pragma once

#include <cstdint>

#include "common/split_partition.h"

namespace sgl_dsv4 {

// n / divisor for 0 <= n < 2^31 and 1 <= divisor < 2^31, as one wide multiply and a shift.
struct Divisor {
  uint32_t magic = 0;
  int32_t shift = 0;
  int32_t divisor = 1;
};

// With 2^(l - 1) < d <= 2^l: magic = ceil(2^(31 + l) / d) < 2^32 exceeds the quotient by less than 1, so n * magic /
// 2^(31 + l) exceeds n / d by less than n / 2^(31 + l) <= 2^-l <= 1 / d: never enough to reach the next integer.
constexpr Divisor make_divisor(int32_t d) {
  int l = 0;
  while ((int64_t{1} << l) < d) ++l;
  const uint64_t magic = ((uint64_t{1} << (31 + l)) + static_cast<uint64_t>(d) - 1) / static_cast<uint64_t>(d);
  return {static_cast<uint32_t>(magic), 31 + l, d};
}
SGL_DSV4_HOST_DEVICE constexpr uint32_t divide(uint32_t n, const Divisor& d) {
  return static_cast<uint32_t>(static_cast<uint64_t>(n) * d.magic >> d.shift);
}
static_assert(divide(0x7fffffffu, make_divisor(1)) == 0x7fffffffu && divide(191, make_divisor(64)) == 2);
static_assert(divide(0x7fffffffu, make_divisor(3)) == 0x7fffffffu / 3 && divide(8, make_divisor(3)) == 2);
static_assert(divide(0x7fffffffu, make_divisor(0x7fffffff)) == 1 && divide(0x7ffffffeu, make_divisor(0x7fffffff)) == 0);

}  // namespace sgl_dsv4
