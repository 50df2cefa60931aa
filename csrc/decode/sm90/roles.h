// The roles of a block's warpgroups: threads and registers. Host code too.
#pragma once

namespace sgl_dsv4::sm90 {

// setmaxnreg moves registers between the roles; the limits of all warps add up to what the block is launched with.
//
// 64 heads: warpgroups 0 and 1 load Q, compute scores and weights and add to O, which takes 128 registers of each of
// their threads; 2 and 3 gather. Behind its role a warpgroup has no more registers than a gathering one: nobody takes
// registers back before all have met, or an attending warpgroup that comes late to a short block would wait for them
// for ever.
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kConsumerThreads = 2 * kWarpgroupThreads;
inline constexpr int kGatherThreads = 2 * kWarpgroupThreads;
inline constexpr int kTileThreads = kConsumerThreads + kGatherThreads;
inline constexpr int kLaunchRegisters = 128;
inline constexpr int kConsumerRegisters = 208;
inline constexpr int kGatherRegisters = 48;
static_assert(kTileThreads * kLaunchRegisters <= 65536 &&
              2 * kConsumerRegisters + 2 * kGatherRegisters <= 4 * kLaunchRegisters);

// 8, 16 or 32 heads: four warpgroups compute scores and add to O, one copies rows, one makes weights of scores.
inline constexpr int kEightHeads = 8;
inline constexpr int kAttendWarps = 16;
inline constexpr int kCopyWarps = 4;
inline constexpr int kWeighWarps = 4;
inline constexpr int kAttendThreads = kAttendWarps * 32;
inline constexpr int kRawThreads = kAttendThreads + (kCopyWarps + kWeighWarps) * 32;
inline constexpr int kRawLaunchRegisters = 80;
inline constexpr int kRawRegisters = kRawThreads / 32 * kRawLaunchRegisters;  // of a lane of every warp
static_assert(kRawThreads * kRawLaunchRegisters <= 65536);

// 8 heads: each of the four does both.
inline constexpr int kEightAttendRegisters = 96;
inline constexpr int kEightCopyRegisters = 48;
inline constexpr int kEightWeighRegisters = 48;
static_assert(kAttendWarps * kEightAttendRegisters + kCopyWarps * kEightCopyRegisters +
                  kWeighWarps * kEightWeighRegisters <=
              kRawRegisters);

// 16 or 32 heads: two compute scores, two add to O.
inline constexpr int kScoreThreads = 2 * kWarpgroupThreads;
inline constexpr int kValueThreads = kAttendThreads - kScoreThreads;
template <int kHeads>
inline constexpr int kFewScoreRegisters = kHeads == 32 ? 72 : 88;
template <int kHeads>
inline constexpr int kFewValueRegisters = kHeads == 32 ? 120 : 104;
// What a value warp takes before the kernel before has ended. The rest it gets when the scoring warps have given
// theirs.
template <int kHeads>
inline constexpr int kFewEarlyValueRegisters = kHeads == 32 ? 112 : kRawLaunchRegisters;
inline constexpr int kFewCopyRegisters = 40;
inline constexpr int kFewWeighRegisters = 56;
constexpr bool few_registers_fit(int score, int value) {
  return kScoreThreads / 32 * score + kValueThreads / 32 * value + kCopyWarps * kFewCopyRegisters +
             kWeighWarps * kFewWeighRegisters <=
         kRawRegisters;
}
template <int kHeads>
inline constexpr bool kFewRegistersFit = few_registers_fit(kRawLaunchRegisters, kFewEarlyValueRegisters<kHeads>) &&
                                         few_registers_fit(kFewScoreRegisters<kHeads>, kFewValueRegisters<kHeads>);
static_assert(kFewRegistersFit<16> && kFewRegistersFit<32>);

}  // namespace sgl_dsv4::sm90
