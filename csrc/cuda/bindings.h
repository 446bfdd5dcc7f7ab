// What the files of module tp_kernels._cuda share. Addresses and stream handles are plain integers; all
// checks of shapes, dtypes and devices are the caller's.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace tpk {

namespace py = pybind11;

}  // namespace tpk
