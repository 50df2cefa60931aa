// Choice and launch of the store kernels: K = 4 tokens a block in store_warp_per_token, K = 1 in store_block_per_token.
#include "store/norm_rope_store.h"

#include "common/launch.h"
#include "store/block_per_token.cuh"
#include "store/warp_per_token.cuh"

namespace sgl_dsv4 {
namespace {

using StoreKernel = void (*)(StoreParams);

template <typename T, StoreEntry kEntry, CacheLayout kLayout, typename Index>
StoreKernel select_mapping(const StoreConfig& c) {
  if (!c.aligned) return store_block_per_token<T, kEntry, kLayout, Index, false>;
  return c.tokens_per_block == kWarpTokensPerBlock ? store_warp_per_token<T, kEntry, kLayout, Index>
                                                   : store_block_per_token<T, kEntry, kLayout, Index, true>;
}
template <typename T, StoreEntry kEntry, CacheLayout kLayout>
StoreKernel select_index(const StoreConfig& c) {
  if constexpr (kEntry == StoreEntry::kMain) {
    if (c.positions_are_int64)
      return c.slots_are_int64 ? select_mapping<T, kEntry, kLayout, IndexTypes<true, true>>(c)
                               : select_mapping<T, kEntry, kLayout, IndexTypes<true, false>>(c);
  }
  return c.slots_are_int64 ? select_mapping<T, kEntry, kLayout, IndexTypes<false, true>>(c)
                           : select_mapping<T, kEntry, kLayout, IndexTypes<false, false>>(c);
}
template <typename T, StoreEntry kEntry>
StoreKernel select_layout(const StoreConfig& c) {
  return c.layout == CacheLayout::kV4 ? select_index<T, kEntry, CacheLayout::kV4>(c)
                                      : select_index<T, kEntry, CacheLayout::kBf16>(c);
}
template <typename T>
StoreKernel select_entry(const StoreConfig& c) {
  switch (c.entry) {
    case StoreEntry::kMain:
      return select_layout<T, StoreEntry::kMain>(c);
    case StoreEntry::kCompressDecode:
      return select_layout<T, StoreEntry::kCompressDecode>(c);
    case StoreEntry::kCompressExtend:
      return select_layout<T, StoreEntry::kCompressExtend>(c);
  }
  return nullptr;
}
StoreKernel select_kernel(const StoreConfig& c) {
  return c.input_is_fp32 ? select_entry<float>(c) : select_entry<__nv_bfloat16>(c);
}

}  // namespace

// K = 1 while its blocks of 256 threads all run at once: 8 an SM where an SM holds 2048 threads (sm_80, sm_90, sm_100),
// 6 where it holds 1536 (sm_86, sm_89, sm_120). Up to there a row is quicker through: on an H200, 132 SMs and so 1056
// rows, 4.4 against 5.0 us for one row and 6.1 against 6.5 for 1024. A second wave costs more than the longer latency
// of a warp: 7.7 against 7.0 us for 2048 (benchmark/results/h200/norm_rope_store.csv, main, v4).
int choose_tokens_per_block(int64_t num_tokens, int sm_count, int threads_per_sm) {
  const int64_t rows_at_once = static_cast<int64_t>(threads_per_sm / kBlockThreads) * sm_count;
  return num_tokens > rows_at_once ? kWarpTokensPerBlock : 1;
}

cudaError_t launch_norm_rope_store(const StoreConfig& config, const StoreParams& params, cudaStream_t stream) {
  if (params.num_tokens == 0) return cudaSuccess;
  StoreConfig c = config;
  if (!c.aligned) {
    c.tokens_per_block = 1;
  } else if (c.tokens_per_block == 0) {
    DeviceFacts facts;
    if (cudaError_t err = device_facts(&facts); err != cudaSuccess) return err;
    c.tokens_per_block = choose_tokens_per_block(params.num_tokens, facts.sm_count, facts.threads_per_sm);
  }
  const unsigned blocks = (params.num_tokens + c.tokens_per_block - 1) / c.tokens_per_block;
  const int threads = c.tokens_per_block == 1 ? kBlockThreads : 32 * kWarpTokensPerBlock;
  return launch_kernel(select_kernel(c), dim3(blocks), dim3(threads), 0, c.pdl, stream, params);
}

cudaError_t store_device_code() {
  return load_code(
      store_block_per_token<__nv_bfloat16, StoreEntry::kMain, CacheLayout::kV4, IndexTypes<false, false>, true>);
}

}  // namespace sgl_dsv4
