// Eight CUDA devices for a CPU build of torch, as far as autograd's device threads, guards and streams ask for them.
// There is nothing behind them: tensors on them have shapes alone (emulated.py), or their values in the host's memory
// (pretend.py), which the operators here show as a device's and back.
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

using c10::Device, c10::DeviceIndex, c10::DispatchKey, c10::DispatchKeySet, at::Tensor;
using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;

// The host's memory that devices read and write by themselves.
struct Pinned : c10::Allocator {
  static inline std::unordered_map<const void*, size_t> there;
  static inline std::mutex lock;
  static void free(void* at) {
    std::scoped_lock held(lock);
    there.erase(at);
    c10::GetCPUAllocator()->raw_deallocate(at);
  }
  c10::DataPtr allocate(size_t n) override {
    void* at = c10::GetCPUAllocator()->raw_allocate(n ? n : 1);
    std::scoped_lock held(lock);
    there[at] = n ? n : 1;
    return {at, at, free, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return free; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  static bool has(const void* at) {
    std::scoped_lock held(lock);
    for (auto [start, n] : there)
      if (at >= start && at < static_cast<const char*>(start) + n) return true;
    return false;
  }
};
static Pinned pinned;

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex getCurrentDevice() const override { return Guard::getDeviceIndex(); }
  DeviceIndex current_device() const override { return Guard::getDeviceIndex(); }
  DeviceIndex deviceCount() const override { return c10::impl::kFakeGuardImplMaxDevices; }
  bool isPinnedPtr(const void* at) const override { return Pinned::has(at); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
} // namespace at

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

extern "C" void set_device(int index) { Guard::setDeviceIndex(index); }

static Tensor over(c10::Storage storage, const Tensor& x, DispatchKey key) {
  auto made = c10::make_intrusive<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), x.dtype());
  made->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  return Tensor(std::move(made));
}

static void let_go(void* storage) { delete static_cast<c10::Storage*>(storage); }

// The host's view of a device's tensor: its storage is the host's, and holds on to the device's.
static Tensor on_host(const Tensor& x) {
  const c10::Storage& of = x.storage();
  c10::DataPtr data(of.mutable_data(), new c10::Storage(of), let_go, Device(c10::kCPU));
  return over(
      c10::Storage(c10::Storage::use_byte_size_t(), of.nbytes(), std::move(data), c10::GetCPUAllocator(), true),
      x, DispatchKey::CPU);
}

// Of such a view the device's own; what is new becomes the device's.
static c10::Storage device_storage(const Tensor& x, int64_t index) {
  auto& data = x.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (data.get_deleter() == let_go) return *static_cast<c10::Storage*>(data.get_context());
  if (data.device().is_cpu()) data.unsafe_set_device(Device(c10::kCUDA, static_cast<DeviceIndex>(index)));
  return x.storage();
}

static Tensor on_device(const Tensor& x, int64_t index) {
  return over(device_storage(x, index), x, DispatchKey::CUDA);
}

// What its view has become on the host.
static void adopt(const Tensor& x, const Tensor& view) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(device_storage(view, x.device().index()));
  x.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
}

TORCH_LIBRARY(pretend, m) {
  const DispatchKey all = DispatchKey::CompositeExplicitAutograd;
  m.def("on_host(Tensor x) -> Tensor", torch::dispatch(all, on_host));
  m.def("on_device(Tensor x, int index) -> Tensor", torch::dispatch(all, on_device));
  m.def("adopt(Tensor x, Tensor view) -> ()", torch::dispatch(all, adopt));
}
