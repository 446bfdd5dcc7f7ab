# Module tp_kernels._cuda: the files of this folder and, where the headers of CUTLASS are given, the products
# of gemm_sm90/ with bindings_gemm*.cpp. A new file needs no entry; bindings_X.cpp defines bind_X(), which
# the module calls.
set(CMAKE_CUDA_ARCHITECTURES ${TPK_CUDA_ARCHS})
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")

set(cuda csrc/cuda)
file(GLOB cuda_sources CONFIGURE_DEPENDS ${cuda}/*.cpp ${cuda}/*.cu)
file(GLOB gemm_sources CONFIGURE_DEPENDS
  ${cuda}/gemm_sm90/*.cpp ${cuda}/gemm_sm90/*.cu ${cuda}/bindings_gemm*.cpp)
list(REMOVE_ITEM cuda_sources ${gemm_sources})

add_library(tpk_cuda INTERFACE)
target_include_directories(tpk_cuda INTERFACE csrc/include ${cuda})
target_compile_options(tpk_cuda INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>")
# Static, so that there is no library to find at run time: what it needs of the driver it loads itself.
target_link_libraries(tpk_cuda INTERFACE CUDA::cudart_static pybind11::module)

pybind11_add_module(_cuda NO_EXTRAS ${cuda_sources})
target_include_directories(_cuda PRIVATE ${CMAKE_BINARY_DIR}/cuda)
target_link_libraries(_cuda PRIVATE tpk_cuda)
target_link_options(_cuda PRIVATE -Wl,--exclude-libs,ALL -s)

set(gemm_images "")
if(TPK_CUTLASS_INCLUDE)
  set(gemm_images "sm_90a")
  set(folder ${CMAKE_BINARY_DIR}/gemm_sm90)
  include(${cuda}/gemm_sm90/instances.cmake)
  list(APPEND gemm_sources ${gemm_instances})
  # A target of their own, because architectures are those of a target.
  add_library(tpk_gemm_sm90 OBJECT ${gemm_sources})
  set_target_properties(tpk_gemm_sm90 PROPERTIES CUDA_ARCHITECTURES "90a-real")
  target_include_directories(tpk_gemm_sm90 PRIVATE ${folder})
  target_include_directories(tpk_gemm_sm90 SYSTEM PRIVATE ${TPK_CUTLASS_INCLUDE})
  target_compile_options(tpk_gemm_sm90 PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>")
  target_link_libraries(tpk_gemm_sm90 PRIVATE tpk_cuda)
  target_link_libraries(_cuda PRIVATE tpk_gemm_sm90)
  list(APPEND cuda_sources ${gemm_sources})
endif()

set(bindings "")
foreach(source IN LISTS cuda_sources)
  if(source MATCHES "/bindings_([a-z0-9_]+)\\.cpp$")
    string(APPEND bindings "TPK_BINDINGS(${CMAKE_MATCH_1})\n")
  endif()
endforeach()
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/cuda/bindings.inc CONTENT "${bindings}")

target_compile_definitions(_cuda PRIVATE
  TPK_VERSION="${TPK_VERSION}"
  TPK_CUDA_VERSION="${CMAKE_CUDA_COMPILER_VERSION}"
  TPK_CUDA_IMAGES="${TPK_CUDA_IMAGES}"
  TPK_GEMM_IMAGES="${gemm_images}"
  TPK_CUTLASS_VERSION="${TPK_CUTLASS_VERSION}"
  TPK_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
