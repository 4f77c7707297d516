// The operators sparse24::matmul24_cusparselt, sample_mm24_cusparselt and launch24 without Python:
// they look up what is launched and launch it. Plans and kernels are made in Python (matmul/native.py),
// once for each product and stream. Only LibTorch's stable ABI is used, so that one binary serves
// every torch from 2.11 on.

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
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;
using Shape = std::vector<int64_t>;

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
  void* space;  // the workspace; null if it is allocated in each launch
};

// `native.Kernel` has the same fields.
struct Kernel {
  const char* failure;
  int (*launch)(
      void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned,
      unsigned shared, void* stream, void** arguments, void** extra);
  void* function;
  int32_t blocks, threads, shared, device;
  int64_t bytes;  // of the buffer that it fills

  void run(void* stream, void** arguments) const {
    if (!blocks) return;
    const int status =
        launch(function, blocks, 1, 1, threads, 1, 1, shared, stream, arguments, nullptr);
    if (status) throw std::runtime_error("cuLaunchKernel: error " + std::to_string(status));
  }
};

AOTITorchError (*current_stream)(int32_t device, void** stream);
std::mutex mutex, launching;

// What `operation`, an operator of Python, makes of `arguments()`, kept by `key`.
template <typename Made, size_t N, typename Arguments>
const Made& made_once(
    const std::array<int64_t, N>& key, const char* operation, const Arguments& arguments) {
  static std::map<std::array<int64_t, N>, const Made*> known;
  {
    std::lock_guard<std::mutex> alone(mutex);
    auto found = known.find(key);
    if (found != known.end()) return *found->second;
  }
  // The lock is not held, since Python needs its own.
  auto stack = arguments();
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(operation, "", stack.data(), TORCH_ABI_VERSION));
  const auto* made = reinterpret_cast<const Made*>(to<int64_t>(stack[0]));
  if (made->failure) throw std::runtime_error(made->failure);
  std::lock_guard<std::mutex> alone(mutex);
  return *known.emplace(key, made).first->second;
}

int32_t dtype_of(const Tensor& x) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  return dtype;
}

void* stream_of(const Tensor& x) {
  void* stream;
  TORCH_ERROR_CODE_CHECK(current_stream(x.get_device_index(), &stream));
  return stream;
}

std::optional<torch::stable::accelerator::DeviceGuard> on_device_of(const Tensor& x) {
  if (!x.is_cuda()) return std::nullopt;
  return std::optional<torch::stable::accelerator::DeviceGuard>(
      std::in_place, x.get_device_index());
}

Tensor empty(const Shape& shape, int32_t dtype, const Tensor& like) {
  int32_t device_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  Shape strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      shape.size(), shape.data(), strides.data(), dtype, device_type, like.get_device_index(),
      &made));
  return Tensor(made);
}

// The tensor itself if it is as GPU kernels need it, contiguous and aligned, else a copy.
Tensor readable(const Tensor& x) {
  Tensor y = x.is_contiguous() ? x : torch::stable::contiguous(x);
  return reinterpret_cast<uintptr_t>(y.data_ptr()) % 16 ? torch::stable::clone(y) : y;
}

void check(bool holds, const char* message) {
  if (!holds) throw std::runtime_error(message);
}

void check_together(const Tensor& x, const Tensor& y) {
  check(
      x.is_cuda() == y.is_cuda() && x.get_device_index() == y.get_device_index(),
      "the operands of a product are on several devices: move them to one");
}

// The product by cuSPARSELt, written into `out`; `tokens` is as in `Problem`.
void multiply(
    const Tensor& buffer, int64_t rows, int64_t columns, int64_t tokens, const Tensor& dense,
    const std::optional<Tensor>& bias, bool dense_transposed, bool result_transposed,
    ScalarType out_dtype, const Tensor& out) {
  const int32_t result_dtype = to<int32_t>(from(out_dtype)), dtype = dtype_of(dense);
  const int32_t device = dense.get_device_index();
  void* stream = stream_of(dense);
  const auto number = reinterpret_cast<int64_t>(stream);
  const int64_t flags = dense_transposed | result_transposed << 1 | bias.has_value() << 2;
  const auto& launch = made_once<Launch>(
      std::array<int64_t, 8>{rows, columns, tokens, dtype, result_dtype, flags, device, number},
      "sparse24::plan24", [&] {
        return std::array<StableIValue, 10>{
            from(rows), from(columns), from(tokens), from(dtype), from(result_dtype),
            from(dense_transposed), from(result_transposed), from(bias.has_value()),
            from(int64_t(device)), from(number)};
      });
  std::unique_lock<std::mutex> alone(launching, std::defer_lock);
  if (bias) {
    alone.lock();  // threads on one stream share the plan's place for the bias
    Tensor read = torch::stable::from_blob(launch.bias, {rows}, {1}, dense.device(), out_dtype);
    TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(read.get(), bias->get(), 0));
  }
  std::optional<Tensor> workspace;
  void* space = launch.space;
  if (launch.workspace && !space) {
    workspace = empty({launch.workspace}, aoti_torch_dtype_uint8(), dense);
    space = workspace->data_ptr();
  }
  const Tensor a = readable(buffer), b = readable(dense);
  const float one = 1, zero = 0;
  const int status = launch.matmul(
      launch.handle, launch.plan, &one, a.data_ptr(), b.data_ptr(), &zero, out.data_ptr(),
      out.data_ptr(), space, &stream, 1);
  if (status) {
    throw std::runtime_error(std::string("cusparseLtMatmul: ") + launch.error_string(status));
  }
}

Tensor matmul24(
    const Tensor& buffer, int64_t rows, int64_t columns, const Tensor& dense,
    const std::optional<Tensor>& bias, bool dense_transposed, bool result_transposed,
    ScalarType out_dtype) {
  check_together(buffer, dense);
  if (bias) check_together(*bias, dense);
  const auto guard = on_device_of(dense);
  const int64_t last = dense.dim() - 1;
  check(dense.size(dense_transposed ? last : 0) == columns, "the operands' shapes do not fit");
  const int64_t tokens = dense_transposed ? dense.numel() / columns : dense.size(1);
  Shape shape{rows, tokens};
  if (result_transposed) {
    shape.clear();
    for (int64_t i = 0; i < last; ++i) shape.push_back(dense.size(i + !dense_transposed));
    shape.push_back(rows);
  }
  Tensor out = empty(shape, to<int32_t>(from(out_dtype)), dense);
  if (dense.numel() == 0) return torch::stable::zero_(out);
  multiply(
      buffer, rows, columns, tokens, dense, bias, dense_transposed, result_transposed, out_dtype,
      out);
  return out;
}

Tensor sample_mm24(
    const Tensor& dy, const Tensor& x, const Tensor& key, int64_t stride) {
  check_together(dy, x);
  check_together(key, x);
  const auto guard = on_device_of(dy);
  const int64_t rows = dy.size(dy.dim() - 1), columns = x.size(x.dim() - 1);
  int64_t tokens = rows ? dy.numel() / rows : 0;
  const int32_t dtype = dtype_of(dy), device = dy.get_device_index();
  check(dtype == dtype_of(x) && x.numel() == tokens * columns, "the operands' shapes do not fit");
  Tensor out = empty({rows, columns}, dtype, x);
  if (!dy.numel() || !x.numel()) return torch::stable::zero_(out);
  Tensor of = readable(dy), with = readable(key);
  const auto& kernel = made_once<Kernel>(
      std::array<int64_t, 5>{rows, tokens, dtype, stride, device}, "sparse24::sampling24",
      [&] { return std::array<StableIValue, 3>{from(of), from(with), from(stride)}; });
  Tensor buffer = empty({kernel.bytes}, aoti_torch_dtype_uint8(), dy);
  void *read = of.data_ptr(), *drawn = with.data_ptr(), *values = buffer.data_ptr();
  void *meta = static_cast<char*>(values) + rows * tokens / 2 * dy.element_size();
  void* none = nullptr;  // for Triton's own two arguments
  void* arguments[] = {&read, &drawn, &stride, &values, &meta, &tokens, &none, &none};
  kernel.run(stream_of(dy), arguments);
  multiply(
      buffer, rows, tokens, columns, x, std::nullopt, false, false,
      to<ScalarType>(from(dtype)), out);
  return out;
}

// Runs one of Triton's kernels on the current stream. arguments: addresses, whole numbers, and the
// bits of fp32 numbers.
void launch24(int64_t kernel, std::vector<int64_t> arguments) {
  const auto& known = *reinterpret_cast<const Kernel*>(kernel);
  std::vector<void*> given;
  int64_t none = 0;
  for (auto& argument : arguments) given.push_back(&argument);
  given.insert(given.end(), 2, &none);  // Triton's own
  void* stream;
  TORCH_ERROR_CODE_CHECK(current_stream(known.device, &stream));
  known.run(stream, given.data());
}

}  // namespace

// Makes these the operators' kernels for a dispatch key, and returns the registration. `stream` is
// the shim's function that gives the current stream of a device.
extern "C" __attribute__((visibility("default"))) void* sparse24_start(
    const char* key, AOTITorchError (*stream)(int32_t, void**)) {
  current_stream = stream;
  TorchLibraryHandle library;
  static TorchLibraryHandle without_tensors;  // kept as long as the process
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_library_init_impl("sparse24", key, __FILE__, __LINE__, &library));
  TORCH_ERROR_CODE_CHECK(torch_library_impl(
      library, "matmul24_cusparselt", TORCH_BOX(&matmul24), TORCH_ABI_VERSION));
  TORCH_ERROR_CODE_CHECK(torch_library_impl(
      library, "sample_mm24_cusparselt", TORCH_BOX(&sample_mm24), TORCH_ABI_VERSION));
  TORCH_ERROR_CODE_CHECK(aoti_torch_library_init_impl(
      "sparse24", "CompositeExplicitAutograd", __FILE__, __LINE__, &without_tensors));
  TORCH_ERROR_CODE_CHECK(torch_library_impl(
      without_tensors, "launch24", TORCH_BOX(&launch24), TORCH_ABI_VERSION));
  return library;
}
