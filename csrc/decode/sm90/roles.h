// The roles of a block's warpgroups: threads and registers. Host code too.
#pragma once

namespace sgl_dsv4::sm90 {

// Warpgroup 0 computes scores and weights, 1 adds to O, 2 and 3 gather. At 64 heads O takes 128 registers of each
// thread of two warpgroups: 1 has the left half, 4 the right one. setmaxnreg moves registers between the roles; the
// limits of all warpgroups add up to what the block is launched with. Behind its role a warpgroup has no more than a
// gathering one: nobody takes registers back before all have met, or a value warpgroup that comes late to a short block
// would wait for them for ever.
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kConsumerThreads = 2 * kWarpgroupThreads;  // 0 and 1, which load Q
inline constexpr int kGatherThreads = 2 * kWarpgroupThreads;
inline constexpr int kThreads = kConsumerThreads + kGatherThreads;

inline constexpr int kTileThreads = kThreads + kWarpgroupThreads;
inline constexpr int kLaunchRegisters = 96;
inline constexpr int kScoreRegisters = 64;
inline constexpr int kValueRegisters = 160;
inline constexpr int kGatherRegisters = 48;
static_assert(kTileThreads * kLaunchRegisters <= 65536 &&
              kScoreRegisters + 2 * kValueRegisters + 2 * kGatherRegisters <= 5 * kLaunchRegisters);

// With 16 or 32 heads all of O is in warpgroup 1, and warpgroup 0 keeps what it gets.
inline constexpr int kFewLaunchRegisters = 128;
inline constexpr int kFewValueRegisters = 176;
inline constexpr int kFewGatherRegisters = 112;
inline constexpr int kFewScoreRegisters = kFewGatherRegisters;
static_assert(kThreads * kFewLaunchRegisters <= 65536 &&
              kFewScoreRegisters + kFewValueRegisters + 2 * kFewGatherRegisters <= 4 * kFewLaunchRegisters);

// With 8 heads four warpgroups compute scores and add to O, one copies rows, one makes weights of scores.
inline constexpr int kEightHeads = 8;
inline constexpr int kAttendWarps = 16;
inline constexpr int kCopyWarps = 4;
inline constexpr int kWeighWarps = 4;
inline constexpr int kAttendThreads = kAttendWarps * 32;
inline constexpr int kEightHeadsThreads = kAttendThreads + (kCopyWarps + kWeighWarps) * 32;
inline constexpr int kEightHeadsLaunchRegisters = 80;
inline constexpr int kAttendRegisters = 96;
inline constexpr int kCopyRegisters = 48;
inline constexpr int kWeighRegisters = 48;
static_assert(kEightHeadsThreads * kEightHeadsLaunchRegisters <= 65536 &&
              kAttendWarps * kAttendRegisters + kCopyWarps * kCopyRegisters + kWeighWarps * kWeighRegisters <=
                  kEightHeadsThreads / 32 * kEightHeadsLaunchRegisters);

}  // namespace sgl_dsv4::sm90
