#include "torch_device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

namespace fake_device {
namespace {

constexpr uint32_t kPoolStreams = 8;

thread_local c10::StreamId current = 0;

c10::Stream stream_of(c10::StreamId number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, 0), number);
}

// Stream 1 .. kPoolStreams are the pool's, handed out in turn.
c10::StreamId next_of_pool() {
  static const std::vector<uint32_t> pool = [] {
    std::vector<uint32_t> streams;
    for (uint32_t i = 0; i < kPoolStreams; ++i) streams.push_back(Machine::get().new_stream());
    return streams;
  }();
  static std::atomic<uint32_t> next{0};
  return pool[next++ % kPoolStreams];
}

// What c10::Event points to.
struct EventState {
  MarkPtr mark;
};
EventState& state_of(void* event) { return *static_cast<EventState*>(event); }

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device /*device*/) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*high*/) const override {
    return stream_of(next_of_pool());
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): nobody follows it
    return reinterpret_cast<void*>(static_cast<uintptr_t>(number_of(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Machine::get().query(Machine::get().record(number_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Machine::get().synchronize(number_of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override {
    for (uint32_t i = 0; i <= kPoolStreams; ++i) Machine::get().synchronize(i);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    Machine::get().use_on(memory.get(), number_of(stream));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new EventState;
    state_of(*event).mark = Machine::get().record(number_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Machine::get().wait(number_of(stream), state_of(event).mark);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Machine::get().query(state_of(event).mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Machine::get().synchronize(state_of(event).mark);
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex /*device*/) const override {
    return 1e3 * (state_of(end).mark->time - state_of(begin).mark->time);
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<EventState*>(event);
  }
};

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* memory = Machine::get().allocate(num_bytes, current_stream());
    return {memory, memory, &release, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }
  static void release(void* memory) { Machine::get().free(memory); }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* memory = num_bytes == 0 ? nullptr : std::malloc(num_bytes);
    const std::lock_guard lock(mutex);
    pinned[memory] = num_bytes;
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }
  static void release(void* memory) {
    size_t num_bytes = 0;
    {
      const std::lock_guard lock(mutex);
      num_bytes = std::exchange(pinned[memory], 0);
      pinned.erase(memory);
    }
    Machine::get().free_on_host(memory, num_bytes);
  }
  static inline std::mutex mutex;
  static inline std::map<const void*, size_t> pinned;  // sizes
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex /*device*/) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  at::Device getDeviceFromPtr(void* /*memory*/) const override { return {kDevice, 0}; }
  // New memory with the old contents, in the order of the current stream; the old is freed.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    c10::DataPtr memory = device_allocator.allocate(num_bytes);
    const void* from = storage.data();
    void* to = memory.get();
    if (const size_t kept = std::min(storage.nbytes(), num_bytes); kept > 0) {
      Machine::get().enqueue(current_stream(), "copy to resized memory",
                             [=](const Touched& touched) {
                               touched.read(from, kept);
                               touched.write(to, kept);
                               std::memcpy(to, from, kept);
                             });
    }
    storage.set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* memory) const override {
    const std::lock_guard lock(PinnedAllocator::mutex);
    return PinnedAllocator::pinned.count(memory) != 0;
  }
};

// --- operators -----------------------------------------------------------------------------------

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/,
                 std::optional<bool> /*pin*/, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> /*device*/, std::optional<bool> /*pin*/) {
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

size_t span_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return static_cast<size_t>(last + 1) * tensor.element_size();
}

// In the order of the current stream. The host waits unless its side is pinned and the caller does
// not mind. Only pinned memory is watched: the rest is free to be used for something else at once.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool from_device = from.device().type() == kDevice;
  const bool to_device = to.device().type() == kDevice;
  const bool both = from_device && to_device;
  const at::Tensor source = on_host(from), target = on_host(to);
  const bool pinned = !both && (from_device ? to : from).is_pinned();
  Machine::get().enqueue(
      current_stream(), "copy",
      [=](const Touched& touched) {
        if (from_device || pinned) touched.read(source.const_data_ptr(), span_bytes(source));
        if (to_device || pinned) touched.write(target.mutable_data_ptr(), span_bytes(target));
        const at::AutoDispatchBelowADInplaceOrView no_grad;
        target.copy_(source);
      },
      /*is_kernel=*/both);
  if (!both && !(non_blocking && pinned))
    Machine::get().synchronize(current_stream(), /*counted=*/false);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) {
    const at::Tensor resized = at::empty(from.sizes(), to.options());
    to.unsafeGetTensorImpl()->set_storage_keep_dtype(resized.storage());
    to.unsafeGetTensorImpl()->set_sizes_contiguous(from.sizes());
  }
  return copy_from(from, to, false);
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

}  // namespace

uint32_t number_of(const c10::Stream& stream) { return static_cast<uint32_t>(stream.id()); }
uint32_t current_stream() { return static_cast<uint32_t>(current); }

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(c10::kCPU));
}

void register_device() {
  static const GuardImpl guard;
  static Hooks hooks;
  static const c10::impl::DeviceGuardImplRegistrar registrar(kDevice, &guard);
  // With a name it is torch's accelerator, before any GPU, and so the one that memory is pinned
  // for.
  c10::register_privateuse1_backend("fake");
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kDevice, &device_allocator);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view",
               static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace fake_device
