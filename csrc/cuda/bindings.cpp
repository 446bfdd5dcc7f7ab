// Module tp_kernels._cuda. Importing it does not touch the driver, so it loads where there is none.
#include "bindings.h"

#include "device_info.h"

namespace tpk {

// bindings.inc lists the files bindings_*.cpp.
#define TPK_BINDINGS(name) void bind_##name(py::module_& module);
#include "bindings.inc"
#undef TPK_BINDINGS

}  // namespace tpk

using namespace tpk;

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "CUDA kernels of tp_kernels.";
  module.def(
      "build_info",
      [] {
        py::dict info;
        info["version"] = TPK_VERSION;
        info["cuda"] = TPK_CUDA_VERSION;
        info["archs"] = TPK_CUDA_IMAGES;
        info["gemm_archs"] = TPK_GEMM_IMAGES;
        info["cutlass"] = TPK_CUTLASS_VERSION;
        info["compiler"] = TPK_COMPILER;
        return info;
      },
      "What this was built from; `archs` and `gemm_archs` are lists of images, space separated.");

  module.def(
      "versions",
      [] {
        const auto [runtime, driver] = versions();
        py::dict found;
        found["runtime"] = runtime;
        found["driver"] = driver;
        return found;
      },
      "Of CUDA, as 1000 * major + 10 * minor: `runtime` of this module, `driver` the latest that the "
      "driver serves, 0 without one. Does not start the driver.");

  module.def(
      "device_info",
      [] {
        DeviceInfo found;
        {
          py::gil_scoped_release released;
          found = device_info();
        }
        py::list devices;
        for (const Device& device : found.devices) {
          py::dict entry;
          entry["name"] = device.name;
          entry["capability"] = device.capability;
          entry["multiprocessors"] = device.multiprocessors;
          entry["multicast"] = device.multicast;
          devices.append(entry);
        }
        py::dict info;
        info["problem"] = found.problem;
        info["devices"] = devices;
        info["peers"] = found.peers;
        return info;
      },
      "What CUDA finds here, see device_info.h. Starts the driver; raises nothing if there is none.");

#define TPK_BINDINGS(name) bind_##name(module);
#include "bindings.inc"
#undef TPK_BINDINGS
}
