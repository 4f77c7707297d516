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
#include <cstdint>

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

struct Arguments {  // mirrored by `Arguments` in matmul/cuda.py
  int32_t rows, tokens, columns;
  int32_t raster;   // order of the tiles: 0 CUTLASS' choice, 1 rows first, 2 tokens first
  int32_t swizzle;  // tiles of the other dimension that are multiplied next to each other
  int32_t multiprocessors;
  int32_t clusters;  // most that can run at the same time
  void const *values, *metadata, *x, *bias, *scale_a, *scale_b;
  void *result, *workspace;
};

static typename Gemm::Arguments describe(Arguments const &a) {
  auto shape = make_tuple(a.rows, a.tokens, a.columns, 1);
  cutlass::KernelHardwareInfo hardware;
  hardware.sm_count = a.multiprocessors;
  hardware.max_active_clusters = a.clusters;
  auto stride_x = cutlass::make_cute_packed_stride(typename Kernel::StrideB{},
                                                   make_shape(a.tokens, a.columns, 1));
  auto stride_d =
      cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, make_shape(a.rows, a.tokens, 1));
  typename Scale::Arguments scale;
  scale.scalar_ptrs[0] = static_cast<float const *>(a.scale_a);
  scale.scalar_ptrs[1] = static_cast<float const *>(a.scale_b);
  scale.scalars[0] = scale.scalars[1] = 1.0f;
  typename Gemm::Arguments given{
      cutlass::gemm::GemmUniversalMode::kGemm,
      shape,
      {static_cast<Element const *>(a.values), SparseConfig::fill_layoutA(shape),
       static_cast<Element const *>(a.x), stride_x,
       static_cast<typename Mainloop::ElementE const *>(a.metadata),
       SparseConfig::fill_layoutE(shape)},
      {{scale, {}, {static_cast<Result const *>(a.bias), Result(0), {}}, {}},
       nullptr,
       {},
       static_cast<Result *>(a.result),
       stride_d},
      hardware};
  using Raster = remove_cvref_t<decltype(given.scheduler.raster_order)>;
  given.scheduler.max_swizzle_size = a.swizzle;
  given.scheduler.raster_order = a.raster == 1   ? Raster::AlongM
                                 : a.raster == 2 ? Raster::AlongN
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

// Clusters that can run at the same time on the current device.
EXPORT int32_t most_clusters() {
  return cutlass::KernelHardwareInfo::query_device_max_active_clusters<Kernel>();
}

EXPORT int64_t workspace_bytes(Arguments const *a) {
  return static_cast<int64_t>(Gemm::get_workspace_size(describe(*a)));
}

// Launches on the stream. Returns 0, 100 + CUTLASS' status if the shape is refused, or 200 + it if
// the launch failed.
EXPORT int32_t launch(Arguments const *a, cudaStream_t stream) {
  auto given = describe(*a);
  Gemm gemm;
  auto status = Gemm::can_implement(given);
  if (status != cutlass::Status::kSuccess) return 100 + static_cast<int32_t>(status);
  status = gemm.initialize(given, a->workspace, stream);
  if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
  return status == cutlass::Status::kSuccess ? 0 : 200 + static_cast<int32_t>(status);
}
