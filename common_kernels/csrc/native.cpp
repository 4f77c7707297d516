// The operator sparse24::matmul24_cusparselt without Python: it looks up the plan of a product and
// launches it. Plans are made in Python (matmul/native.py), once for each product and stream. Only
// LibTorch's stable ABI is used, so that one binary serves every torch from 2.11 on.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

// `native.Launch` has the same fields. `failure` is null unless Python could not make the plan.
struct Launch {
  const char* failure;
  int (*matmul)(
      const void* handle, const void* plan, const void* alpha, const void* a, const void* b,
      const void* beta, const void* c, void* d, void* workspace, void** streams, int32_t count);
  const char* (*error_string)(int status);
  const void* handle;
  const void* plan;
  void* bias;  // where the kernel reads it
  int64_t workspace;  // bytes
};

// rows, columns, tokens, dtype, dtype of the result, flags, device, stream
using Problem = std::array<int64_t, 8>;

AOTITorchError (*current_stream)(int32_t device, void** stream);
std::mutex mutex, launching;
std::map<Problem, const Launch*> plans;

const Launch& plan_of(const Problem& p) {
  {
    std::lock_guard<std::mutex> alone(mutex);
    auto found = plans.find(p);
    if (found != plans.end()) return *found->second;
  }
  // Python prepares the plan. The lock is not held, since Python needs its own.
  StableIValue stack[10] = {
      from(p[0]), from(p[1]), from(p[2]), from(int32_t(p[3])), from(int32_t(p[4])),
      from(bool(p[5] & 1)), from(bool(p[5] & 2)), from(bool(p[5] & 4)), from(p[6]), from(p[7])};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("sparse24::plan24", "", stack, TORCH_ABI_VERSION));
  const auto* made = reinterpret_cast<const Launch*>(to<int64_t>(stack[0]));
  if (made->failure) throw std::runtime_error(made->failure);
  std::lock_guard<std::mutex> alone(mutex);
  return *plans.emplace(p, made).first->second;
}

Tensor empty(std::array<int64_t, 2> shape, int32_t dtype, const Tensor& like) {
  int32_t device_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const int64_t strides[2] = {shape[1], 1};
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      2, shape.data(), strides, dtype, device_type, like.get_device_index(), &made));
  return Tensor(made);
}

// The tensor itself if its memory is aligned as GPU kernels need it, else a copy.
Tensor aligned(const Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 ? torch::stable::clone(x) : x;
}

Tensor matmul24(
    const Tensor& buffer, int64_t rows, int64_t columns, const Tensor& dense,
    const std::optional<Tensor>& bias, bool dense_transposed, bool result_transposed,
    ScalarType out_dtype) {
  const int32_t device = dense.get_device_index();
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (dense.is_cuda()) guard.emplace(device);
  const int64_t tokens = dense.size(dense_transposed ? 0 : 1);
  const int32_t result_dtype = to<int32_t>(from(out_dtype));
  Tensor out = result_transposed ? empty({tokens, rows}, result_dtype, dense)
                                 : empty({rows, tokens}, result_dtype, dense);
  if (dense.numel() == 0) return torch::stable::zero_(out);
  int32_t dtype;
  void* stream;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(dense.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(current_stream(device, &stream));
  const int64_t flags = dense_transposed | result_transposed << 1 | bias.has_value() << 2;
  const Launch& launch = plan_of(
      {rows, columns, tokens, dtype, result_dtype, flags, device,
       reinterpret_cast<int64_t>(stream)});
  std::unique_lock<std::mutex> alone(launching, std::defer_lock);
  if (bias) {
    alone.lock();  // threads on one stream share the plan's place for the bias
    Tensor read = torch::stable::from_blob(launch.bias, {rows}, {1}, dense.device(), out_dtype);
    TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(read.get(), bias->get(), 0));
  }
  std::optional<Tensor> workspace;
  if (launch.workspace) workspace = empty({1, launch.workspace}, aoti_torch_dtype_uint8(), dense);
  const Tensor a = aligned(buffer), b = aligned(dense);
  const float one = 1, zero = 0;
  const int status = launch.matmul(
      launch.handle, launch.plan, &one, a.data_ptr(), b.data_ptr(), &zero, out.data_ptr(),
      out.data_ptr(), workspace ? workspace->data_ptr() : nullptr, &stream, 1);
  if (status) {
    throw std::runtime_error(std::string("cusparseLtMatmul: ") + launch.error_string(status));
  }
  return out;
}

}  // namespace

// Makes this the operator's kernel for a dispatch key, and returns the registration. `stream` is
// the shim's function that gives the current stream of a device.
extern "C" __attribute__((visibility("default"))) void* sparse24_start(
    const char* key, AOTITorchError (*stream)(int32_t, void**)) {
  current_stream = stream;
  TorchLibraryHandle library;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_library_init_impl("sparse24", key, __FILE__, __LINE__, &library));
  TORCH_ERROR_CODE_CHECK(torch_library_impl(
      library, "matmul24_cusparselt", TORCH_BOX(&matmul24), TORCH_ABI_VERSION));
  return library;
}
