// Eight CUDA devices for a CPU build of torch, as far as autograd's device threads, guards and streams ask for them.
// There is nothing behind them: tensors on them have shapes alone, or their values elsewhere.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 8; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
} // namespace at

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>);
