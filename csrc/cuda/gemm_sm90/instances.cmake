# Writes a file for each kernel to `folder`, and the list of them; their paths are in gemm_instances.
#
# Tiles are rows, columns, teams and stages of shared memory. A stage of 128 x 256 takes 1024 cycles of the
# matrix units for 48 KiB of loads, one of 128 x 128 takes 512 for 32 KiB: the large tile asks least of the L2
# cache and is the best for many rows, at the price of stores that nothing hides; the small one is for results that
# would leave multiprocessors idle, and two teams hide its stores. What sends needs both warpgroups for a
# tile, since a block is a channel; its small tile is for chunks of 32 KiB and for few rows.
#
# Layouts are what forward (K K), gradients of inputs (K MN) and of weights (MN MN) have in memory.
set(large "128, 256, 1, 4")
set(small "128, 128, 2, 6")
set(small_shared "128, 128, 1, 6")
set(gemm_instances "")
set(listed "")
foreach(number Bfloat16 Float16)
  foreach(kind
      "signal;signal;Signal;K;K;large" "signal;signal;Signal;K;K;small"
      "signal;signal;Signal;K;MN;large" "signal;signal;Signal;K;MN;small"
      "await;await_rows;AwaitRows;K;K;large" "await;await_rows;AwaitRows;K;K;small"
      "await;await_rows;AwaitRows;K;MN;large" "await;await_rows;AwaitRows;K;MN;small"
      "await;await_sum;AwaitSum;MN;MN;large" "await;await_sum;AwaitSum;MN;MN;small"
      "send;send;Send;K;K;large" "send;send;Send;K;K;small_shared"
      "send;send;Send;K;MN;large" "send;send;Send;K;MN;small_shared")
    list(GET kind 0 header)
    list(GET kind 1 entry)
    list(GET kind 2 policy)
    list(GET kind 3 a)
    list(GET kind 4 b)
    list(GET kind 5 size)
    set(tile "${${size}}")
    string(TOLOWER "${entry}_${number}_${a}_${b}_${size}" name)
    configure_file(${CMAKE_CURRENT_LIST_DIR}/instance.cu.in ${folder}/${name}.cu @ONLY)
    list(APPEND gemm_instances ${folder}/${name}.cu)
    string(APPEND listed "TPK_GEMM(${name})\n")
  endforeach()
endforeach()
file(CONFIGURE OUTPUT ${folder}/instances.inc CONTENT "${listed}")
