// The product of a packed 2:4 matrix A [rows, columns] with a dense matrix X, for compute
// capability 9.0, built from CUTLASS' sparse collectives:
//
//     D = A X / scale_a / scale_b + bias,   accumulated in fp32, rounded once to bf16
//
// One translation unit is one configuration. It is given by macros (`Config` in matmul/cuda.py):
//
//     FP8                0: A and X are bf16; 1: both are e4m3; 2: both are e5m2
//     TILE_M, _N, _K     rows, tokens and columns that a thread block multiplies at a time
//     CLUSTER_M, _N      thread blocks that share what they load
//     PINGPONG           1: two groups of warps take turns at tiles; 0: they share a tile
//     STREAM_K           1: tiles are also split along the columns, so that no multiprocessor idles
//     WGRAD              0: X is given as [tokens, columns], D is written as [tokens, rows]
//                        1: X is given as [columns, tokens], D is written as [rows, tokens]; with
//                        FP8, whose operands lie along the columns, X as for 0 and D in fp32
//
// All matrices are row-major. A is its values [rows, columns / 2] and metadata in the layout
// `cutlass_sm90` of common_kernels/pack for METADATA_COLUMNS = min(TILE_K, 128).
#include <dlfcn.h>

#include <cstdint>
#include <utility>

#include "cutlass/cutlass.h"

#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "cutlass/util/packed_stride.hpp"

using namespace cute;
namespace fusion = cutlass::epilogue::fusion;

#if FP8 == 1
using Element = cutlass::float_e4m3_t;
#elif FP8 == 2
using Element = cutlass::float_e5m2_t;
#else
using Element = cutlass::bfloat16_t;
#endif
using Result = conditional_t<WGRAD && FP8 != 0, float, cutlass::bfloat16_t>;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
// CUTLASS computes D [rows, tokens] from X [columns, tokens]: transposed, they are column-major.
using LayoutX = conditional_t<WGRAD && !FP8, RowMajor, ColumnMajor>;
using LayoutD = conditional_t<WGRAD, RowMajor, ColumnMajor>;
using TileShape = Shape<Int<TILE_M>, Int<TILE_N>, Int<TILE_K>>;
using ClusterShape = Shape<Int<CLUSTER_M>, Int<CLUSTER_N>, _1>;
constexpr int kAlignment = 128 / cutlass::sizeof_bits<Element>::value;
constexpr int kAlignmentD = 128 / cutlass::sizeof_bits<Result>::value;
constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

#if PINGPONG
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
using Schedule = conditional_t<FP8 != 0, cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum,
                               cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
#else
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecializedCooperative;
using Schedule = conditional_t<FP8 != 0, cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum,
                               cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
#endif
using Scheduler = conditional_t<STREAM_K, cutlass::gemm::StreamKScheduler,
                                cutlass::gemm::PersistentScheduler>;

// One after the other: the product of two scales may overflow.
template <class T>
struct Reciprocals {
  CUTLASS_HOST_DEVICE T operator()(T const &a, T const &b) const { return T(1) / a / b; }
};

// sum / scale_a / scale_b + bias; a null pointer is 1 for a scale and 0 for the bias.
using Scale = fusion::Sm90ScalarBroadcast<float, Stride<_0, _0, int64_t>, 2, Reciprocals>;
using Bias =
    fusion::Sm90ColBroadcast<0, TileShape, Result, float, Stride<_1, _0, int64_t>, kAlignmentD>;
using Scaled = fusion::Sm90EVT<
    fusion::Sm90Compute<cutlass::homogeneous_multiply_add, Result, float, kRound>, Scale,
    fusion::Sm90AccFetch, Bias>;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassSparseTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, LayoutD, kAlignmentD,
    Result, LayoutD, kAlignmentD, EpilogueSchedule, Scaled>::CollectiveOp;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassSparseTensorOp, Element, RowMajor, kAlignment,
    Element, LayoutX, kAlignment, float, TileShape, ClusterShape,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename Epilogue::SharedStorage))>,
    Schedule>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue,
                                                   Scheduler>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
using SparseConfig = typename Mainloop::SparseConfig;

struct Sizes {  // mirrored by `_Sizes` in matmul/cuda.py
  int32_t rows, tokens, columns;
  int32_t raster;   // order of the tiles: 0 CUTLASS' choice, 1 rows first, 2 tokens first
  int32_t swizzle;  // tiles of the other dimension that are multiplied next to each other
  int32_t multiprocessors;
};

struct Addresses {  // mirrored by `_ADDRESSES` in matmul/cuda.py and `Addresses` in native.cpp
  void const *values, *metadata, *x, *bias, *scale_a, *scale_b;
  void *result, *workspace;
};

// What every launch of a product has in common. It is made once, because CUTLASS takes longer for it
// than a launch takes, and is never changed and never freed.
struct Plan {
  typename Kernel::Arguments given;
  typename Kernel::Params params;  // with addresses of nothing, which a launch replaces in its copy
  dim3 grid;
  decltype(&cuTensorMapReplaceAddress) replace;
};

// What the epilogue reads.
static typename Scaled::Arguments scaled(Addresses const &a) {
  typename Scale::Arguments scale;
  scale.scalar_ptrs[0] = static_cast<float const *>(a.scale_a);
  scale.scalar_ptrs[1] = static_cast<float const *>(a.scale_b);
  scale.scalars[0] = scale.scalars[1] = 1.0f;
  return {scale, {}, {static_cast<Result const *>(a.bias), Result(0), {}}, {}};
}

static typename Kernel::Arguments describe(Sizes const &s) {
  auto shape = make_tuple(s.rows, s.tokens, s.columns, 1);
  cutlass::KernelHardwareInfo hardware;
  hardware.sm_count = s.multiprocessors;
  // Clusters that can run at the same time on the current device.
  hardware.max_active_clusters =
      cutlass::KernelHardwareInfo::query_device_max_active_clusters<Kernel>();
  auto stride_x = cutlass::make_cute_packed_stride(typename Kernel::StrideB{},
                                                   make_shape(s.tokens, s.columns, 1));
  auto stride_d =
      cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, make_shape(s.rows, s.tokens, 1));
  // Drivers before CUDA 12.6 describe no tensor at address 0.
  void *nowhere = reinterpret_cast<void *>(uintptr_t(1) << 20);
  typename Kernel::Arguments given{
      cutlass::gemm::GemmUniversalMode::kGemm,
      shape,
      {static_cast<Element const *>(nowhere), SparseConfig::fill_layoutA(shape),
       static_cast<Element const *>(nowhere), stride_x,
       static_cast<typename Mainloop::ElementE const *>(nowhere),
       SparseConfig::fill_layoutE(shape)},
      {scaled({}), nullptr, {}, static_cast<Result *>(nowhere), stride_d},
      hardware};
  using Raster = remove_cvref_t<decltype(given.scheduler.raster_order)>;
  given.scheduler.max_swizzle_size = s.swizzle;
  given.scheduler.raster_order = s.raster == 1   ? Raster::AlongM
                                 : s.raster == 2 ? Raster::AlongN
                                                 : Raster::Heuristic;
  return given;
}

#define EXPORT extern "C" __attribute__((visibility("default")))

// The number of the group of four columns whose metadata stand at the place of this group's, in
// units of four bits: with it a packer is checked without a GPU.
EXPORT int64_t metadata_place(int32_t rows, int32_t columns, int32_t row, int32_t column) {
  auto layout = SparseConfig::fill_layoutE(make_tuple(rows, 1, columns, 1));
  return static_cast<int64_t>(layout(row, column, 0)) / 4;
}

// Makes the plan of a product on the current device, and tells how many bytes of workspace its
// launches need. Returns 0, 100 + CUTLASS' status if the shape is refused, or 200 + CUDA's error.
EXPORT int32_t prepare(Sizes const *sizes, Plan const **plan, int64_t *workspace) {
  auto given = describe(*sizes);
  auto status = Gemm::can_implement(given);
  if (status != cutlass::Status::kSuccess) return 100 + static_cast<int32_t>(status);
  auto *kernel = cutlass::device_kernel<Kernel>;
  auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    Kernel::SharedStorageSize);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
  void *replace = driver ? dlsym(driver, "cuTensorMapReplaceAddress") : nullptr;
  if (error == cudaSuccess && !replace) error = cudaErrorSymbolNotFound;
  if (error != cudaSuccess) return 200 + error;
  auto params = Kernel::to_underlying_arguments(given, nullptr);
  *workspace = static_cast<int64_t>(Kernel::get_workspace_size(given));
  *plan = new Plan{given, params, Kernel::get_grid_shape(params),
                   reinterpret_cast<decltype(Plan::replace)>(replace)};
  return 0;
}

// Puts the addresses into the descriptions of tensors.
static CUresult place(Plan const *plan, typename Kernel::Params &params, Addresses const *a) {
  auto &mainloop = params.mainloop;
  std::pair<CUtensorMap *, void const *> const tensors[] = {
      {&mainloop.tma_load_a.tma_desc_, a->values},
      {&mainloop.tma_load_e.tma_desc_, a->metadata},
      {&mainloop.tma_load_b.tma_desc_, a->x},
      {&params.epilogue.tma_store_d.tma_desc_, a->result}};
  for (auto [tensor, address] : tensors)
    if (CUresult error = plan->replace(tensor, const_cast<void *>(address))) return error;
  return CUDA_SUCCESS;
}

// Launches on the stream. Several threads may share a plan. Returns as `prepare` does.
EXPORT int32_t launch(Plan const *plan, Addresses const *a, cudaStream_t stream) {
  auto params = plan->params;
  auto placed = place(plan, params, a);
  if (placed == CUDA_ERROR_INVALID_CONTEXT) {  // the first call of CUDA in this thread
    int device = 0;
    cudaGetDevice(&device);
    cudaSetDevice(device);
    placed = place(plan, params, a);
  }
  if (placed) return 200 + placed;
  params.epilogue.thread =
      Scaled::to_underlying_arguments(params.problem_shape, scaled(*a), nullptr);
#if STREAM_K
  params.workspace = params.scheduler.reduction_workspace_ = a->workspace;
  // Sets the counters to zero by which thread blocks wait for one another.
  auto status = Kernel::initialize_workspace(plan->given, a->workspace, stream);
  if (status != cutlass::Status::kSuccess) return 100 + static_cast<int32_t>(status);
#endif
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {CLUSTER_M, CLUSTER_N, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = plan->grid;
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  void *arguments[] = {&params};
  auto *kernel = reinterpret_cast<void const *>(cutlass::device_kernel<Kernel>);
  auto error = cudaLaunchKernelExC(&config, kernel, arguments);
  if (error == cudaSuccess) return 0;
  cudaGetLastError();  // else a later call of this library would report it again
  return 200 + error;
}
