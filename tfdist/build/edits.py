"""What tfdist changes in the source of Horovod 0.28.1, each change with its reason. Data.

`NEEDED` lets it compile against current TensorFlow and run on several hosts; `FASTER` takes waiting and
copying out of its loop; `GPU` comes on top in a build with NCCL.
"""

from __future__ import annotations

from tfdist.build.patch import Edit

_PROCESS_SET = (
    "  device_attr.ai_family = AF_UNSPEC;\n"
    "  auto dev = CreateDevice(device_attr);\n"
    "\n"
    "  global_ctx = global_context.ctx;\n"
)

NEEDED: tuple[Edit, ...] = (
    Edit(
        file="horovod/tensorflow/CMakeLists.txt",
        old='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        new="",
        why="leave out the XLA operations: they exist for GPUs only, and their includes no longer "
        "compile since TensorFlow moved its XLA headers",
    ),
    Edit(
        file="horovod/common/gloo/gloo_context.cc",
        # The lines after it tell this place from two others, where the own name is right.
        old="  device_attr.iface = gloo_iface_;\n" + _PROCESS_SET,
        new="  device_attr.iface = global_context.gloo_iface_;\n" + _PROCESS_SET,
        why="let a process set use the network interface that was asked for; its own is empty, so "
        "Gloo resolves the host name, often to 127.0.1.1, and several hosts cannot connect",
    ),
    Edit(
        file="horovod/common/common.h",
        old="#include <memory>\n#include <string>\n#include <unordered_map>\n",
        new="#include <memory>\n#include <stdexcept>\n#include <string>\n"
        "#include <unordered_map>\n",
        why="include what is used: gcc 13 and later no longer bring <stdexcept> along",
    ),
    Edit(
        file="horovod/common/group_table.h",
        old="#include <queue>\n#include <unordered_map>\n#include <vector>\n",
        new="#include <queue>\n#include <string>\n#include <unordered_map>\n#include <vector>\n",
        why="include what is used: gcc 13 and later no longer bring <string> along",
    ),
    Edit(
        file="horovod/runner/js_run.py",
        old="from distutils.spawn import find_executable\n",
        new="from shutil import which as find_executable\n",
        why="let horovodrun start on Python 3.12 and later, which have no distutils",
    ),
)

FASTER: tuple[Edit, ...] = (
    Edit(
        file="third_party/gloo/gloo/transport/tcp/pair.cc",
        old="  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);\n  if (!lock) {\n    return;\n",
        new="  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);\n  if (!lock) {\n"
        "    std::this_thread::yield();\n    return;\n",
        why="let the sender that holds the lock run: on its core the waiting thread came back from "
        "epoll at once, again and again, until the kernel's next tick, 4 ms for an all-reduce of 0.6",
    ),
    Edit(
        file="third_party/gloo/gloo/transport/tcp/pair.cc",
        old="#include <sstream>\n",
        new="#include <sstream>\n#include <thread>\n",
        why="declare std::this_thread::yield",
    ),
    Edit(
        file="horovod/common/tensor_queue.h",
        old="#include <iostream>\n#include <mutex>\n",
        new="#include <chrono>\n#include <condition_variable>\n#include <iostream>\n#include <mutex>\n",
        why="declare what waiting for a tensor needs",
    ),
    Edit(
        file="horovod/common/tensor_queue.h",
        old="  void FinalizeTensorQueue(const Status& status);\n",
        new="  using Time = std::chrono::steady_clock::time_point;\n"
        "  // Returns when a tensor has been added since the last call, or else at `idle`, or at\n"
        "  // `busy` while tensors of this rank wait for other ranks.\n"
        "  void WaitForArrival(Time busy, Time idle);\n\n"
        "  void FinalizeTensorQueue(const Status& status);\n",
        why="let the background thread sleep until there is work",
    ),
    Edit(
        file="horovod/common/tensor_queue.h",
        old="  mutable std::mutex mutex_;\n",
        new="  mutable std::mutex mutex_;\n\n  bool arrived_ = false;\n  std::condition_variable arrival_;\n",
        why="let the background thread sleep until there is work",
    ),
    Edit(
        file="horovod/common/tensor_queue.cc",
        old="  message_queue_.push(std::move(message));\n  return Status::OK();\n",
        new="  message_queue_.push(std::move(message));\n"
        "  arrived_ = true;\n  arrival_.notify_one();\n  return Status::OK();\n",
        why="wake the background thread for a tensor",
    ),
    Edit(
        file="horovod/common/tensor_queue.cc",
        old="    message_queue_.push(std::move(messages[i]));\n  }\n  return Status::OK();\n}\n",
        new="    message_queue_.push(std::move(messages[i]));\n  }\n"
        "  arrived_ = true;\n  arrival_.notify_one();\n  return Status::OK();\n}\n\n"
        "void TensorQueue::WaitForArrival(Time busy, Time idle) {\n"
        "  std::unique_lock<std::mutex> lock(mutex_);\n"
        "  arrival_.wait_until(lock, tensor_table_.empty() ? idle : busy,\n"
        "                      [this] { return arrived_; });\n"
        "  arrived_ = false;\n}\n",
        why="wake the background thread for a group of tensors",
    ),
    Edit(
        file="horovod/common/operations.cc",
        old="  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {\n"
        "    std::this_thread::sleep_for(sleep_duration);\n",
        new="  // HOROVOD_IDLE_CYCLE_TIME (ms): start when a tensor comes, and look for the other ranks that\n"
        "  // slowly while there is nothing to do; a hundred times as often while tensors wait for others,\n"
        "  // under MPI, where such a look keeps a core busy until all are there, ten times.\n"
        "  // Only with one process set; else, and when unset or 0, HOROVOD_CYCLE_TIME as ever.\n"
        "  static const double idle_ms = GetDoubleEnvOrDefault(\"HOROVOD_IDLE_CYCLE_TIME\", 0);\n"
        "  if (idle_ms > 0 && state.process_set_table.Ids().size() == 1) {\n"
        "    double busy_ms = idle_ms / (state.control_operation == LibType::MPI ? 10 : 100);\n"
        "    state.process_set_table.Get(0).tensor_queue.WaitForArrival(\n"
        "        start_time + std::chrono::microseconds(long(busy_ms * 1000.)),\n"
        "        start_time + std::chrono::microseconds(long(idle_ms * 1000.)));\n"
        "  } else if (sleep_duration > std::chrono::steady_clock::duration::zero()) {\n"
        "    std::this_thread::sleep_for(sleep_duration);\n",
        why="start on a tensor at once, and leave the core to the computation while there is none: "
        "each cycle exchanges messages with all ranks",
    ),
    Edit(
        file="horovod/tensorflow/mpi_ops.cc",
        old="    auto tensor = context->input(0);\n"
        "    horovod::common::ReduceOp reduce_op = static_cast<horovod::common::ReduceOp>(reduce_op_);\n"
        "    Tensor* output;\n    OP_REQUIRES_OK_ASYNC(\n"
        "        context, context->allocate_output(0, tensor.shape(), &output), done);\n",
        new="    horovod::common::ReduceOp reduce_op = static_cast<horovod::common::ReduceOp>(reduce_op_);\n"
        "    Tensor* output;\n    OP_REQUIRES_OK_ASYNC(\n"
        "        context,\n"
        "        context->forward_input_or_allocate_output({0}, 0, context->input(0).shape(), &output),\n"
        "        done);\n    auto tensor = context->input(0);\n",
        why="reduce in place where nothing else uses the input: a packed bucket is not copied again",
    ),
    Edit(
        file="horovod/common/ops/gloo_operations.cc",
        old="    buffer_data = (void*)first_entry.output->data();\n"
        "    std::memcpy(buffer_data, first_entry.tensor->data(),\n"
        "                (size_t)first_entry.tensor->size());\n"
        "    fused_input_data = buffer_data;\n  }\n\n  if (prescale_factor != 1.0) {\n",
        new="    buffer_data = (void*)first_entry.output->data();\n"
        "    if (buffer_data != first_entry.tensor->data()) {\n"
        "      std::memcpy(buffer_data, first_entry.tensor->data(),\n"
        "                  (size_t)first_entry.tensor->size());\n    }\n"
        "    fused_input_data = buffer_data;\n  }\n\n  if (prescale_factor != 1.0) {\n",
        why="reduce in place where nothing else uses the input: a packed bucket is not copied again",
    ),
)

EDITS = NEEDED + FASTER

# Where a wheel of NVIDIA's for NCCL has its library, seen from horovod/tensorflow in the same site-packages.
_NCCL = "$ORIGIN/../../nvidia/nccl/lib"

GPU: tuple[Edit, ...] = (
    Edit(
        file="horovod/tensorflow/mpi_ops.cc",
        old="// Forward declaration of AsGpuStreamValue\n"
        "namespace stream_executor {\nnamespace gpu {\n"
        "GpuStreamHandle AsGpuStreamValue(Stream* stream);\n"
        "} // namespace stream_executor\n} // namespace gpu\n"
        "#if TENSORFLOW_VERSION >= 2011000000\n"
        '#include "tensorflow/compiler/xla/stream_executor/stream.h"\n'
        "#else\n"
        '#include "tensorflow/stream_executor/stream.h"\n'
        "#endif // TENSORFLOW_VERSION >= 2011000000\n",
        new='#include "xla/stream_executor/stream.h"\n\n'
        "namespace stream_executor {\nnamespace gpu {\n"
        "static inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {\n"
        "  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\n"
        "}\n} // namespace gpu\n} // namespace stream_executor\n",
        why="ask the stream itself for CUDA's handle, and take its header from where it is now: TensorFlow "
        "has dropped the function that gave the handle",
    ),
    Edit(
        file="cmake/Modules/FindNCCL.cmake",
        old='    set(NCCL_LIBNAME "nccl")\n',
        new='    set(NCCL_LIBNAME "libnccl.so.2")\n',
        why="find NCCL in NVIDIA's wheel, which has the library without the plain name for linking",
    ),
    Edit(
        file="CMakeLists.txt",
        old="        list(APPEND LINKER_LIBS ${NCCL_LIBRARIES})\n",
        new="        get_filename_component(NCCL_LIBRARY_DIR ${NCCL_LIBRARIES} DIRECTORY)\n"
        '        list(APPEND LINKER_LIBS "-L${NCCL_LIBRARY_DIR}" "-l:${NCCL_LIBRARY_FILE_NAME}")\n',
        why="link NCCL by its name: by its path, the path of the environment that built the wheel is what a "
        "process in another environment would look in",
    ),
    Edit(
        file="horovod/tensorflow/CMakeLists.txt",
        old='set_target_properties(${TF_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib")\n',
        new='set_target_properties(${TF_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib")\n'
        f'set_target_properties(${{TF_TARGET_LIB}} PROPERTIES BUILD_RPATH "{_NCCL}")\n',
        why="find NCCL's wheel at run time beside Horovod, without LD_LIBRARY_PATH",
    ),
)
