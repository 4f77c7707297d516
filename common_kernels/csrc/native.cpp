// Operators of sparse24 without Python: they look up what is launched and launch it. Plans and
// kernels are made in Python (matmul/native.py), once for each product and stream. Only LibTorch's
// stable ABI is used, so that one binary serves every torch from 2.11 on.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
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
  int (*own)(const void* plan, const void* addresses, void* stream);  // launches our own kernel
  const char* refused;  // what is said if it fails, before the status
  int64_t values;  // bytes of the packed matrix before its metadata
};

struct Addresses {  // that our own kernels read and write, as in product24_sm90.cu
  const void *values, *metadata, *x, *bias, *scale_a, *scale_b;
  void *result, *workspace;
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
  int64_t ones;  // bit i: argument i is 1, which Triton has compiled in

  // arguments: addresses, whole numbers, and the bits of fp32 numbers.
  void run(void* stream, const Shape& arguments, int64_t without = 0) const {
    if (!blocks) return;
    std::vector<void*> given;
    int64_t none = 0;
    for (size_t i = 0; i < arguments.size(); ++i)
      if (!(without >> i & 1)) given.push_back(const_cast<int64_t*>(&arguments[i]));
    given.insert(given.end(), 2, &none);  // Triton's own
    const int status =
        launch(function, blocks, 1, 1, threads, 1, 1, shared, stream, given.data(), nullptr);
    if (status) throw std::runtime_error("cuLaunchKernel: error " + std::to_string(status));
  }
  void operator()(void* stream, const Shape& arguments) const { run(stream, arguments, ones); }
};

AOTITorchError (*current_stream)(int32_t device, void** stream);
int (*memset32)(void* where, unsigned value, size_t count, void* stream);  // the driver's
std::mutex mutex, launching;

// What `operation`, an operator of Python, makes of `arguments()`, kept by `key`.
template <typename Made, typename Arguments>
const Made& made_once(const Shape& key, const char* operation, const Arguments& arguments) {
  static std::map<Shape, const Made*> known;
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

int64_t address(const Tensor& x) { return reinterpret_cast<int64_t>(x.data_ptr()); }

void* pointer(const std::optional<Tensor>& x) { return x ? x->data_ptr() : nullptr; }

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
  return address(y) % 16 ? torch::stable::clone(y) : y;
}

// The kernels that Python launches by this name for such numbers and tensors; `key` holds what else
// they depend on.
const Kernel* kernels(
    const std::string& name, const Shape& numbers, const std::vector<Tensor>& tensors, Shape key) {
  key.insert(key.end(), numbers.begin(), numbers.end());
  for (const Tensor& x : tensors) {  // Triton compiles a kernel for aligned addresses
    key.push_back(dtype_of(x) << 1 | (address(x) % 16 == 0));
  }
  key.push_back(tensors[0].get_device_index());
  key.push_back(std::hash<std::string>{}(name));
  return &made_once<Kernel>(key, "sparse24::kernels24", [&] {
    return std::array<StableIValue, 3>{from(name), from(numbers), from(tensors)};
  });
}

void check(bool holds, const char* message) {
  if (!holds) throw std::runtime_error(message);
}

void check_together(const Tensor& x, const Tensor& y) {
  check(
      x.is_cuda() == y.is_cuda() && x.get_device_index() == y.get_device_index(),
      "the operands of a product are on several devices: move them to one");
}

// The product, written into `out`; `tokens` is as in `Problem`. Only our own kernels take scales.
void multiply(
    const Tensor& buffer, const std::string& layout, int64_t rows, int64_t columns, int64_t tokens,
    const Tensor& dense, const std::optional<Tensor>& bias, const std::optional<Tensor>& scale,
    const std::optional<Tensor>& other, bool dense_transposed, bool result_transposed,
    ScalarType out_dtype, const Tensor& out) {
  const int32_t result_dtype = to<int32_t>(from(out_dtype)), dtype = dtype_of(dense);
  const int32_t device = dense.get_device_index();
  void* stream = stream_of(dense);
  const auto number = reinterpret_cast<int64_t>(stream);
  const bool biased = bias && !scale;
  const int64_t flags = dense_transposed | result_transposed << 1 | biased << 2;
  const int64_t named = std::hash<std::string>{}(layout);
  const auto& launch = made_once<Launch>(
      Shape{rows, columns, tokens, dtype, result_dtype, flags, device, number, named},
      "sparse24::plan24", [&] {
        return std::array<StableIValue, 11>{
            from(rows), from(columns), from(tokens), from(dtype), from(result_dtype),
            from(dense_transposed), from(result_transposed), from(biased), from(layout),
            from(int64_t(device)), from(number)};
      });
  std::unique_lock<std::mutex> alone(launching, std::defer_lock);
  if (bias && !launch.own) {
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
  if (launch.own) {
    std::optional<Tensor> added;
    if (bias) added = readable(torch::stable::to(*bias, out_dtype));
    const Addresses given{
        a.data_ptr(), static_cast<const char*>(a.data_ptr()) + launch.values, b.data_ptr(),
        pointer(added), pointer(scale), pointer(other), out.data_ptr(), space};
    const int status = launch.own(launch.plan, &given, stream);
    if (status) throw std::runtime_error(launch.refused + std::to_string(status));
    return;
  }
  const float one = 1, zero = 0;
  const int status = launch.matmul(
      launch.handle, launch.plan, &one, a.data_ptr(), b.data_ptr(), &zero, out.data_ptr(),
      out.data_ptr(), space, &stream, 1);
  if (status) {
    throw std::runtime_error(std::string("cusparseLtMatmul: ") + launch.error_string(status));
  }
}

Tensor matmul24(
    const Tensor& buffer, std::string layout, int64_t rows, int64_t columns, const Tensor& dense,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& scale,
    const std::optional<Tensor>& other, bool dense_transposed, bool result_transposed,
    std::optional<ScalarType> given_dtype) {
  const ScalarType out_dtype = given_dtype ? *given_dtype : dense.scalar_type();
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
      buffer, layout, rows, columns, tokens, dense, bias, scale, other, dense_transposed,
      result_transposed, out_dtype, out);
  return out;
}

Tensor sample_mm24(
    const Tensor& dy, const Tensor& x, const Tensor& key, int64_t stride, std::string layout,
    int64_t multiple) {
  check_together(dy, x);
  check_together(key, x);
  const auto guard = on_device_of(dy);
  const int64_t rows = dy.size(dy.dim() - 1), columns = x.size(x.dim() - 1);
  int64_t tokens = rows ? dy.numel() / rows : 0;
  const int32_t dtype = dtype_of(dy);
  check(dtype == dtype_of(x) && x.numel() == tokens * columns, "the operands' shapes do not fit");
  Tensor out = empty({rows, columns}, dtype, x);
  if (!dy.numel() || !x.numel()) return torch::stable::zero_(out);
  Tensor of = readable(dy), given = x;
  const Tensor with = readable(key);
  if (const int64_t missing = (multiple - tokens % multiple) % multiple) {
    of = torch::stable::pad(torch::stable::reshape(of, {tokens, rows}), {0, 0, 0, missing});
    given = torch::stable::pad(torch::stable::reshape(x, {tokens, columns}), {0, 0, 0, missing});
    tokens += missing;
  }
  const Kernel& kernel = *kernels("sample24 " + layout, {stride}, {of, with}, {rows, tokens});
  Tensor buffer = empty({kernel.bytes}, aoti_torch_dtype_uint8(), dy);
  const int64_t values = address(buffer), meta = values + rows * tokens / 2 * dy.element_size();
  kernel(stream_of(dy), {address(of), address(with), stride, values, meta, tokens});
  multiply(
      buffer, layout, rows, tokens, columns, given, std::nullopt, std::nullopt, std::nullopt,
      false, false, to<ScalarType>(from(dtype)), out);
  return out;
}

Shape shape_of(const Tensor& x, int64_t last) {
  Shape shape;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) shape.push_back(x.size(i));
  shape.push_back(last);
  return shape;
}

Tensor compress24(
    const Tensor& given, const Tensor& bits, int64_t n, int64_t m, ScalarType dtype) {
  check_together(given, bits);
  const auto guard = on_device_of(given);
  const Tensor x = readable(given), mask = readable(bits);
  const int64_t columns = x.size(x.dim() - 1);
  Tensor values = empty(shape_of(x, columns / m * n), to<int32_t>(from(dtype)), x);
  if (x.numel()) {
    const auto* found = kernels("compress24", {n, m}, {x, mask, values}, {x.numel(), columns});
    found[0](
        stream_of(x),
        {address(x), address(values), address(mask), x.numel() / m, columns / m});
  }
  return values;
}

// --- FP8 ----------------------------------------------------------------------------------------

constexpr int64_t TILE = 64;  // tokens that a program of the quantising kernels takes

int32_t format(int64_t number) {
  return number ? aoti_torch_dtype_float8_e5m2() : aoti_torch_dtype_float8_e4m3fn();
}

Tensor number_on(const Tensor& like) { return empty({}, aoti_torch_dtype_float32(), like); }

// The place of a stream for the bits of a largest magnitude.
void* place_of(const Tensor& x, void* stream) {
  const int64_t number = reinterpret_cast<int64_t>(stream), device = x.get_device_index();
  return made_once<Launch>({device, number}, "sparse24::place24", [&] {
    return std::array<StableIValue, 2>{from(device), from(number)};
  }).space;
}

// Searches x for its largest magnitude and gives the address of its bits, which the stream's next
// launches may read until the lock is released: like a plan's bias, they have one place a stream.
struct Largest {
  void* place;
  std::lock_guard<std::mutex> alone{launching};
  int64_t bits;

  Largest(const Kernel& kernel, const Shape& given, const Tensor& x, void* stream)
      : place(place_of(x, stream)), bits(reinterpret_cast<int64_t>(place)) {
    const int status = memset32(place, 0, 1, stream);
    if (status) throw std::runtime_error("cuMemsetD32Async: error " + std::to_string(status));
    Shape arguments = given;
    arguments.insert(arguments.end(), {bits, x.numel()});
    kernel(stream, arguments);
  }
};

using Both = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Sampled = std::tuple<Tensor, Tensor, Tensor>;

// scaling: amax and seen, with delayed scaling.
Both quantize_both(
    const Tensor& given, int64_t fmt, int64_t fmt_transposed, std::vector<Tensor> scaling = {}) {
  const auto guard = on_device_of(given);
  const Tensor x = readable(given);
  const int64_t columns = x.size(x.dim() - 1), rows = columns ? x.numel() / columns : 0;
  const int64_t padded = (rows + TILE - 1) / TILE * TILE;
  Tensor codes = empty(shape_of(x, columns), format(fmt), x);
  Tensor turned = empty({columns, padded}, format(fmt_transposed), x);
  Tensor scale = number_on(x), scale_turned = number_on(x);
  if (!x.numel()) {
    torch::stable::fill_(scale, 1);
    torch::stable::fill_(scale_turned, 1);
    return {codes, turned, scale, scale_turned};
  }
  std::vector<Tensor> tensors{x};
  tensors.insert(tensors.end(), scaling.begin(), scaling.end());
  const auto* found = kernels("quantize_both24", {fmt, fmt_transposed}, tensors, {rows, columns});
  void* stream = stream_of(x);
  const bool delayed = !scaling.empty();
  std::optional<Largest> amax;
  if (!delayed) amax.emplace(*found++, Shape{address(x)}, x, stream);
  for (int i = 0; i <= (fmt == fmt_transposed); ++i) {
    found[i](
        stream, {address(x), address(codes), address(turned),
                 delayed ? address(scaling[0]) : amax->bits, address(scale), address(scale_turned),
                 address(delayed ? scaling[1] : scale), rows, columns, padded});
  }
  return {codes, turned, scale, scale_turned};
}

Both quantize_both24(const Tensor& x, int64_t fmt, int64_t fmt_transposed) {
  return quantize_both(x, fmt, fmt_transposed);
}

Both quantize_both24_(
    const Tensor& x, int64_t fmt, int64_t fmt_transposed, const Tensor& amax, const Tensor& seen) {
  return quantize_both(x, fmt, fmt_transposed, {amax, seen});
}

Sampled quantize_and_sample(
    const Tensor& given, const Tensor& key, int64_t stride, int64_t fmt, const std::string& layout,
    std::vector<Tensor> scaling = {}) {
  check_together(given, key);
  const auto guard = on_device_of(given);
  const Tensor dy = readable(given), drawn = readable(key);
  const int64_t out = dy.size(dy.dim() - 1), tokens = out ? dy.numel() / out : 0;
  Tensor codes = empty(shape_of(dy, out), format(fmt), dy), scale = number_on(dy);
  if (!dy.numel()) {
    torch::stable::fill_(scale, 1);
    return {codes, empty({0}, aoti_torch_dtype_uint8(), dy), scale};
  }
  std::vector<Tensor> tensors{dy, drawn};
  tensors.insert(tensors.end(), scaling.begin(), scaling.end());
  const auto* found = kernels(
      "quantize_and_sample24 " + layout, {stride, fmt}, tensors, {tokens, out});
  void* stream = stream_of(dy);
  const bool delayed = !scaling.empty();
  std::optional<Largest> amax;
  if (!delayed) amax.emplace(*found++, Shape{address(dy)}, dy, stream);
  Tensor buffer = empty({found->bytes}, aoti_torch_dtype_uint8(), dy);
  const int64_t padded = found->blocks / (out / TILE) * TILE, values = address(buffer);
  (*found)(
      stream, {address(dy), address(drawn), stride, address(codes), values,
               values + out * padded / 2, delayed ? address(scaling[0]) : amax->bits,
               address(scale), address(delayed ? scaling[1] : scale), tokens, padded, out});
  return {codes, buffer, scale};
}

Sampled quantize_and_sample24(
    const Tensor& dy, const Tensor& key, int64_t stride, int64_t fmt, std::string layout) {
  return quantize_and_sample(dy, key, stride, fmt, layout);
}

Sampled quantize_and_sample24_(
    const Tensor& dy, const Tensor& key, int64_t stride, int64_t fmt, std::string layout,
    const Tensor& amax, const Tensor& seen) {
  return quantize_and_sample(dy, key, stride, fmt, layout, {amax, seen});
}

// Writes the codes of a weight and of its transpose; a packed one is a buffer of bytes.
void quantize_weight24(
    std::string kinds, const Tensor& own, const Tensor& other, const Tensor& scales,
    const Tensor& w, const std::optional<Tensor>& mask, const std::optional<Tensor>& beta,
    const std::optional<Tensor>& amax) {
  const auto guard = on_device_of(w);
  void* stream = stream_of(w);
  const bool dense = dtype_of(own) == dtype_of(other) &&
      dtype_of(own) != aoti_torch_dtype_uint8() && other.is_contiguous();
  std::vector<Tensor> tensors{own, other, scales, w};
  if (mask || beta) tensors.push_back(mask ? *mask : *beta);
  if (amax) tensors.push_back(*amax);
  const auto* found = kernels(
      "quantize_weight24_ " + kinds, {mask ? 1 : beta ? 3 : 0}, tensors,
      {w.size(0), w.size(1), other.is_contiguous(), amax.has_value()});
  const int64_t under = address(mask ? *mask : beta ? *beta : w), values = w.numel() / 2;
  std::optional<Largest> searched;
  if (!amax) searched.emplace(*found++, Shape{address(w), under}, w, stream);
  const int64_t bits = amax ? address(*amax) : searched->bits;
  const auto meta = [&](const Tensor& x) {
    return address(x) + (dtype_of(x) == aoti_torch_dtype_uint8() ? values : 0);
  };
  for (int i = 0; i <= dense; ++i) {  // as weights_triton.start
    found[i](
        stream, {address(w), under, address(w), bits, bits, address(scales),
                 address(own), meta(own), address(other), meta(other), w.size(0), w.size(1)});
  }
}

// The product of codes by cuSPARSELt, times factor / (scale * other), plus the bias.
Tensor scaled24(
    const Tensor& buffer, std::string layout, int64_t rows, int64_t columns, const Tensor& dense,
    const std::optional<Tensor>& bias, const Tensor& scale, const Tensor& other, int64_t factor,
    bool linear, ScalarType out_dtype) {
  const int32_t dtype = linear ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32();
  const Tensor y = matmul24(
      buffer, layout, rows, columns, dense, std::nullopt, std::nullopt, std::nullopt, true, linear,
      to<ScalarType>(from(dtype)));
  const auto guard = on_device_of(y);
  const int32_t result = to<int32_t>(from(out_dtype));
  const int64_t last = y.size(y.dim() - 1);
  Tensor out = result == dtype ? y : empty(shape_of(y, last), result, y);
  if (!y.numel()) return out;
  std::vector<Tensor> tensors{y, out, scale, other};
  if (bias) {
    check_together(*bias, y);
    tensors.push_back(readable(*bias));
  }
  Shape arguments;
  for (const Tensor& x : tensors) arguments.push_back(address(x));
  if (!bias) arguments.push_back(address(y));
  arguments.insert(arguments.end(), {y.numel(), last});
  kernels("rescale", {factor}, tensors, {y.numel(), last})[0](stream_of(y), arguments);
  return out;
}

// The product of codes by cuBLAS, which takes the reciprocals of the scales.
Tensor scaled_linear24(
    const Tensor& x, const Tensor& w, const Tensor& x_scale, const Tensor& w_scale,
    const std::optional<Tensor>& bias, ScalarType dtype) {
  check_together(x, w);
  const auto guard = on_device_of(x);
  const Tensor inverse = number_on(x), other = number_on(x);
  kernels("inverse", {}, {x_scale, w_scale}, {})[0](
      stream_of(x),
      {address(x_scale), address(w_scale), address(inverse), address(other)});
  const int64_t last = x.size(x.dim() - 1);
  const Tensor a = readable(x), b = torch::stable::transpose(readable(w), 0, 1);
  const bool fast = dtype_of(x) == format(0) && dtype_of(w) == format(0);
  std::optional<Tensor> added;
  if (bias) {
    const int32_t bf16 = aoti_torch_dtype_bfloat16();
    added = readable(torch::stable::to(*bias, to<ScalarType>(from(bf16))));
  }
  std::array<StableIValue, 8> stack{
      from(torch::stable::view(a, {last ? a.numel() / last : 0, last})), from(b), from(inverse),
      from(other), from(added), from(std::optional<Tensor>()), from(std::optional(dtype)),
      from(fast)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::_scaled_mm", "", stack.data(), TORCH_ABI_VERSION));
  std::array<StableIValue, 2> shaped{stack[0], from(shape_of(x, w.size(0)))};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::_unsafe_view", "", shaped.data(), TORCH_ABI_VERSION));
  return to<Tensor>(shaped[0]);
}

// Runs one of Triton's kernels on the current stream, with the arguments that it takes.
void launch24(int64_t kernel, Shape arguments) {
  const auto& known = *reinterpret_cast<const Kernel*>(kernel);
  void* stream;
  TORCH_ERROR_CODE_CHECK(current_stream(known.device, &stream));
  known.run(stream, arguments);
}

}  // namespace

// Makes these the operators' kernels for a dispatch key, and returns the registration. `stream` is
// the shim's function that gives the current stream of a device, `memset` cuMemsetD32Async.
extern "C" __attribute__((visibility("default"))) void* sparse24_start(
    const char* key, AOTITorchError (*stream)(int32_t, void**),
    int (*memset)(void*, unsigned, size_t, void*)) {
  current_stream = stream;
  memset32 = memset;
  TorchLibraryHandle library;
  static TorchLibraryHandle without_tensors;  // kept as long as the process
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_library_init_impl("sparse24", key, __FILE__, __LINE__, &library));
  const auto add = [&](const char* name, auto* boxed) {
    TORCH_ERROR_CODE_CHECK(torch_library_impl(library, name, boxed, TORCH_ABI_VERSION));
  };
  add("matmul24_launched", TORCH_BOX(&matmul24));
  add("sample_mm24_launched", TORCH_BOX(&sample_mm24));
  add("matmul24_of_codes", TORCH_BOX(&scaled24));
  add("compress24", TORCH_BOX(&compress24));
  add("scaled_linear24", TORCH_BOX(&scaled_linear24));
  add("quantize_both24", TORCH_BOX(&quantize_both24));
  add("quantize_both24_", TORCH_BOX(&quantize_both24_));
  add("quantize_and_sample24_", TORCH_BOX(&quantize_and_sample24_));
  add("quantize_weight24_", TORCH_BOX(&quantize_weight24));
  add("quantize_and_sample24", TORCH_BOX(&quantize_and_sample24));
  TORCH_ERROR_CODE_CHECK(aoti_torch_library_init_impl(
      "sparse24", "CompositeExplicitAutograd", __FILE__, __LINE__, &without_tensors));
  TORCH_ERROR_CODE_CHECK(torch_library_impl(
      without_tensors, "launch24", TORCH_BOX(&launch24), TORCH_ABI_VERSION));
  return library;
}
