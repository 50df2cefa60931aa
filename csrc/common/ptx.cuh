// PTX instructions, each wrapped once and named like the instruction.
#pragma once

#include <cstdint>

namespace sgl_dsv4 {

inline constexpr uint32_t kAllLanes = 0xffffffffu;  // of a warp, as shuffles and votes take them

}  // namespace sgl_dsv4

namespace sgl_dsv4::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHasGriddepcontrol = true;
#else
inline constexpr bool kHasGriddepcontrol = false;
#endif

// PTX ISA, "griddepcontrol": blocks until every grid this one depends on has finished and its writes are visible.
// A no-op in a grid that was launched without the programmatic attribute. Code below sm_90 has no such wait, and the
// host must not set the attribute for it (see launch.h).
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next grid start its prologue. Says nothing about this grid's results: the next grid's wait covers those.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- registers ----

// PTX ISA, "%ctaid": blockIdx.x. Volatile: asked for again wherever it is used, so that no register keeps it.
__device__ __forceinline__ uint32_t ctaid_x() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// The same for threadIdx.x.
__device__ __forceinline__ int thread_of_block() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// A value that is computed before this point of the program, not where it is used, and not known to the compiler.
template <typename T>
__device__ __forceinline__ void keep(T*& value) {
  asm volatile("" : "+l"(value));
}
__device__ __forceinline__ void keep(int& value) {
  asm volatile("" : "+r"(value));
}
__device__ __forceinline__ void keep(uint32_t& value) {
  asm volatile("" : "+r"(value));
}
__device__ __forceinline__ void keep(float& value) {
  asm volatile("" : "+f"(value));
}

// PTX ISA, "setmaxnreg" (sm_90a): moves the register limit of this warp; every warp of a warpgroup executes it, and the
// sum over the block's warps must not exceed what the block was launched with, or the increase waits for ever.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- global memory ----

// Loads with a condition: no access if not wanted. One asm block each, or the compiler chains them and puts arithmetic
// between them; volatile: they keep their order, so that several are on their way before the first is waited for.

// PTX ISA, "ld.global": `otherwise` if not wanted.
__device__ __forceinline__ uint32_t ld_global_if(bool wanted, const void* address, uint32_t otherwise) {
  uint32_t v;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "mov.b32 %0, %3;\n"
      "@p ld.global.b32 %0, [%1];\n"
      "}\n"
      : "=&r"(v)
      : "l"(address), "r"(static_cast<int>(wanted)), "r"(otherwise));
  return v;
}

__device__ __forceinline__ float ld_global_if(bool wanted, const float* address, float otherwise) {
  float v;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "mov.b32 %0, %3;\n"
      "@p ld.global.f32 %0, [%1];\n"
      "}\n"
      : "=&f"(v)
      : "l"(address), "r"(static_cast<int>(wanted)), "f"(otherwise));
  return v;
}

// 8 bytes; zeros if not wanted.
__device__ __forceinline__ uint2 ld_global_v2_if(bool wanted, const void* address) {
  uint2 v;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "@p ld.global.v2.b32 {%0, %1}, [%2];\n"
      "}\n"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(address), "r"(static_cast<int>(wanted))
      : "memory");
  return v;
}

// 16 bytes by instruction `load`; zeros if not wanted.
#define SGL_DSV4_LOAD_V4_IF(load) \
  "{\n"                           \
  ".reg .pred p;\n"               \
  "setp.ne.b32 p, %5, 0;\n"       \
  "mov.b32 %0, 0;\n"              \
  "mov.b32 %1, 0;\n"              \
  "mov.b32 %2, 0;\n"              \
  "mov.b32 %3, 0;\n"              \
  "@p " load                      \
  " {%0, %1, %2, %3}, [%4];\n"    \
  "}\n"

__device__ __forceinline__ uint4 ld_global_v4_if(bool wanted, const void* address) {
  uint4 v;
  asm volatile(SGL_DSV4_LOAD_V4_IF("ld.global.v4.b32")
               : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
               : "l"(address), "r"(static_cast<int>(wanted))
               : "memory");
  return v;
}

// PTX ISA, "ld.global.cs": values that are read once, evicted first.
__device__ __forceinline__ float4 ld_global_cs_v4_if(bool wanted, const float* address) {
  float4 v;
  asm volatile(SGL_DSV4_LOAD_V4_IF("ld.global.cs.v4.f32")
               : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
               : "l"(address), "r"(static_cast<int>(wanted))
               : "memory");
  return v;
}

#undef SGL_DSV4_LOAD_V4_IF

// ---- shared memory ----

// Address in the shared window, as the instructions below take it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// PTX ISA, "st.shared".
__device__ __forceinline__ void st_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void st_shared(uint32_t address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void st_shared(uint32_t address, uint32_t v, uint32_t w) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v), "r"(w) : "memory");
}
__device__ __forceinline__ void st_shared(uint32_t address, float v, float w) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v), "f"(w) : "memory");
}
__device__ __forceinline__ void st_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// PTX ISA, "ld.shared".
__device__ __forceinline__ uint4 ld_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t ld_shared_8(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t ld_shared_32(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float2 ld_shared_float2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

// PTX ISA, "ldmatrix": four 8 x 8 matrices of 16-bit values; lane 8 i + r names where row r of matrix i begins (16
// bytes). Transposed: lane l gets, of each matrix, the values of column l / 4 in rows 2 (l % 4) and the next.
__device__ __forceinline__ uint4 ldmatrix_trans(uint32_t address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// PTX ISA, "cp.async": 16 bytes from global to shared memory without registers; zeros, and no access, if not wanted.
__device__ __forceinline__ void cp_async_16_if(bool wanted, uint32_t address, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(wanted ? 16 : 0)
               : "memory");
}

// The same by threads for which `here`; the others copy nothing.
__device__ __forceinline__ void cp_async_16_if(bool here, bool wanted, uint32_t address, const void* from) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "@p cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
      "}\n" ::"r"(address),
      "l"(from), "r"(wanted ? 16 : 0), "r"(static_cast<int>(here))
      : "memory");
}

// 8 bytes; they may stay in the L1 too.
__device__ __forceinline__ void cp_async_8_if(bool wanted, uint32_t address, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(address), "l"(from), "r"(wanted ? 8 : 0)
               : "memory");
}

// PTX ISA, "cp.async.commit_group", "cp.async.wait_group": this thread's copies since its last group become a group;
// waits until at most kLater of its last groups are under way. The thread then sees what the others brought.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLater>
__device__ __forceinline__ void cp_async_wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

// PTX ISA, "cp.async.mbarrier.arrive": an arrival of this thread, one of those that the barrier counts, once all its
// cp.async so far have landed.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// 4 bytes; they may stay in the L1 too.
__device__ __forceinline__ void cp_async_4(uint32_t address, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
}

// Waits for all of this thread's cp.async.
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// PTX ISA, "fence.proxy.async", "proxy-preserved base causality order": between ordinary stores to shared memory and
// the wgmma that reads them lie a signal and this fence, in either order: every thread that stored executes it, then
// signals, or the threads that have waited for the signal execute it before their wgmma. The same holds for the copy
// engine, which reads and writes as wgmma reads.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- barriers ----

// PTX ISA, "barrier.sync": `threads` threads meet at hardware barrier `id` (0 is __syncthreads'). Not ".aligned": roles
// that meet come from different places of the program.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// PTX ISA, "barrier.arrive": counts for the barrier of `threads` threads without waiting.
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// PTX ISA, "mbarrier": a phase ends when `arrivals` threads have arrived. A wait names the parity of the phase whose
// end it waits for: 0 for the first, then alternating; parity 1 on a new barrier passes at once.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the asynchronous proxy and to the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// With SGL_DSV4_WATCHDOG (test builds) a wait of more than about a second is an error of the launch instead of a hang.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#ifdef SGL_DSV4_WATCHDOG
  const long long start = clock64();
  while (!mbarrier_try_wait(barrier, parity))
    if (clock64() - start > 2000000000ll) asm volatile("trap;");
#else
  while (!mbarrier_try_wait(barrier, parity)) {
  }
#endif
}

// An arrival, and the phase does not end before `bytes` more have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// PTX ISA, "cp.async.bulk.prefetch.L2": `bytes` of the global memory into the L2, both multiples of 16.
__device__ __forceinline__ void prefetch_l2(const void* address, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

// PTX ISA, "cp.async.bulk": `bytes` of shared memory to the global one, all multiples of 16; by the copy engine, as one
// of those that bulk_commit() makes a group of.
__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

// ---- clusters ----

// PTX ISA, "barrier.cluster": of all threads of the cluster's blocks. What was written before a thread arrived can be
// read behind the wait. A warp arrives and waits as a whole.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Orders nothing: for a thread that wrote nothing that is read behind the wait, or has met one that arrives as above.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// PTX ISA, "mapa": where block `rank` of the cluster has what this one has at `address` in shared memory.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ float ld_cluster(uint32_t address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
// Zero, and no access, unless `wanted`.
__device__ __forceinline__ float ld_cluster_if(bool wanted, uint32_t address) {
  float x = 0.0f;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p ld.shared::cluster.f32 %0, [%1];\n"
      "}\n"
      : "+f"(x)
      : "r"(address), "r"(static_cast<int>(wanted))
      : "memory");
  return x;
}
// Zeros, and no access, unless `wanted`.
__device__ __forceinline__ float4 ld_cluster_v4_if(bool wanted, uint32_t address) {
  float4 v = {};
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
      : "r"(address), "r"(static_cast<int>(wanted))
      : "memory");
  return v;
}

// ---- boxes of a tensor: the copy engine ----

// Where a box of a tensor of four dimensions begins, the fastest dimension first.
struct BoxAt {
  int at[4];
};

// PTX ISA, "cp.async.bulk.tensor": a box of the tensor into shared memory at `address`, zeros outside the tensor; its
// bytes count for `barrier`.
__device__ __forceinline__ void load_box(uint32_t address, const void* map, const BoxAt& box, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(address),
      "l"(map), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]), "r"(box.at[3]), "r"(barrier)
      : "memory");
}
// From shared memory to the tensor, nothing outside it.
__device__ __forceinline__ void store_box(const void* map, const BoxAt& box, uint32_t address) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
               "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]), "r"(box.at[3]), "r"(address)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// This thread's stores have read what they store.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// PTX ISA, "stmatrix": four 8 x 8 matrices of 16 bits; lane l has two columns of row l / 4 of each, and the address of
// row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// ---- arithmetic ----

// PTX ISA, "ex2.approx.ftz.f32": 2^x; what exp2f uses, without its care for results below 2^-126.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA, "prmt": byte i of the result is the byte of `bytes` that nibble i of kSelect names, 0 to 3; with 8 added,
// that byte's top bit eight times.
template <uint32_t kSelect>
__device__ __forceinline__ uint32_t prmt(uint32_t bytes) {
  uint32_t picked;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(picked) : "r"(bytes), "n"(kSelect));
  return picked;
}

// PTX ISA, "mul.rn.bf16x2" (sm_90): subnormal operands and results are kept.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// PTX ISA, "cvt.rn.bf16x2.f32": `low` in the low half.
__device__ __forceinline__ uint32_t cvt_bf16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// PTX ISA, "cvt.rn.f16x2.e4m3x2" (sm_89): exact; the code in the low byte becomes the low half. `codes`: which two of
// the four.
__device__ __forceinline__ uint32_t low_e4m3x2_to_f16x2(uint32_t codes) {
  uint32_t pair;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}\n" : "=r"(pair) : "r"(codes));
  return pair;
}
__device__ __forceinline__ uint32_t high_e4m3x2_to_f16x2(uint32_t codes) {
  uint32_t pair;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}\n"
      : "=r"(pair)
      : "r"(codes));
  return pair;
}

// PTX ISA, "cvt.rn.f16x2.f32": `low` in the low half.
__device__ __forceinline__ uint32_t cvt_f16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// ---- products of a warp ----

// PTX ISA, "mma.m16n8k16": c += a b. Lane l = 4 g + p has c in rows g and g + 8, columns 2 p and the next; a in rows g,
// g + 8, g, g + 8, columns 2 p and the next, the last two 8 columns on; b in rows 2 p and the next, and 8 on, column g.
__device__ __forceinline__ void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace sgl_dsv4::ptx
