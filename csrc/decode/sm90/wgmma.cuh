// The tensor core instructions of a warpgroup (sm_90a): products, of operands that descriptors name (shared_memory.h)
// and of which the first may be in registers, and waiting. PTX ISA, "wgmma".
//
// An accumulator of m64nN is N / 2 registers a thread: with lane l of warp w, row 16 w + l / 4 (+ 8 for the odd pairs),
// columns 8 j + 2 (l % 4) and the next one: d[4 j], d[4 j + 1] in the upper row, d[4 j + 2], d[4 j + 3] in the lower.
#pragma once

#include <cstdint>

namespace sgl_dsv4::sm90 {

#define SGL_DSV4_ACC8(d, i)                                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

// d (+)= A B^T. A: 64 rows, B: 64 rows, both 16 channels wide, row by row in shared memory.
__device__ __forceinline__ void wgmma_m64n64k16(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n"
      "}\n"
      : SGL_DSV4_ACC8(d, 0), SGL_DSV4_ACC8(d, 8), SGL_DSV4_ACC8(d, 16), SGL_DSV4_ACC8(d, 24)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// d += A B. A: 64 rows of 16 weights in registers, `a` the thread's four. B: 16 rows, 128 channels, the 16 being summed
// over.
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
      : SGL_DSV4_ACC8(d, 0), SGL_DSV4_ACC8(d, 8), SGL_DSV4_ACC8(d, 16), SGL_DSV4_ACC8(d, 24), SGL_DSV4_ACC8(d, 32),
        SGL_DSV4_ACC8(d, 40), SGL_DSV4_ACC8(d, 48), SGL_DSV4_ACC8(d, 56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// 16 or 32 heads: d (+)= A B^T. A: 64 rows of 16 values in registers, laid out as mma.m16n8k16's (ptx.cuh), 16 rows a
// warp, of which `a` are the thread's four. B: as many rows as heads, in shared memory.
__device__ __forceinline__ void wgmma_f16(float (&d)[8], const uint32_t* a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, "
      "%12, p, 1, 1, 0;\n"
      "}\n"
      : SGL_DSV4_ACC8(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}
__device__ __forceinline__ void wgmma_f16(float (&d)[16], const uint32_t* a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, "
      "%20, p, 1, 1, 0;\n"
      "}\n"
      : SGL_DSV4_ACC8(d, 0), SGL_DSV4_ACC8(d, 8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}
__device__ __forceinline__ void wgmma_bf16(float (&d)[8], const uint32_t* a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, "
      "%12, p, 1, 1, 0;\n"
      "}\n"
      : SGL_DSV4_ACC8(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}
__device__ __forceinline__ void wgmma_bf16(float (&d)[16], const uint32_t* a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, "
      "%20, p, 1, 1, 0;\n"
      "}\n"
      : SGL_DSV4_ACC8(d, 0), SGL_DSV4_ACC8(d, 8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

#undef SGL_DSV4_ACC8

// Registers that a product reads or writes keep their place in the program: the compiler does not know that wgmma runs
// on after its instruction.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Before the first product that uses registers which ordinary instructions wrote.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
template <int kCount>
__device__ __forceinline__ void wgmma_begin(float (&d)[kCount]) {
  pin(d);
  wgmma_fence();
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for this warpgroup's products, but for the last kLater groups of them: `x`, an accumulator or an operand in
// registers, may then be read and written again.
template <int kLater, typename T, int kCount>
__device__ __forceinline__ void wgmma_wait(T (&x)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLater) : "memory");
  pin(x);
}

}  // namespace sgl_dsv4::sm90
