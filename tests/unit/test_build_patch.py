import dataclasses

import pytest

from tfdist.build import patch
from tfdist.build.edits import EDITS, FASTER, GPU, NEEDED
from tfdist.build.errors import BuildError
from tfdist.build.patch import Edit

# From the sdist of Horovod 0.28.1 (Apache-2.0), with what stands around the edited lines.
SOURCE = {
    "horovod/tensorflow/CMakeLists.txt": """\
# TF SOURCES
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")

# Create library
set_target_properties(${TF_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib")
""",
    "cmake/Modules/FindNCCL.cmake": """\
if (lowercase_HOROVOD_NCCL_LINK STREQUAL "shared")
    set(NCCL_LIBNAME "nccl")
    message(STATUS "Linking against shared NCCL library")
""",
    "CMakeLists.txt": """\
        include_directories(SYSTEM ${NCCL_INCLUDE_DIRS})
        list(APPEND LINKER_LIBS ${NCCL_LIBRARIES})
""",
    # The three functions that set the interface; only the last is wrong.
    "horovod/common/gloo/gloo_context.cc": """\
  attr device_attr;
  device_attr.iface = gloo_iface_;

  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);
  ctx = std::make_shared<gloo::mpi::Context>(mpi_ctx.global_comm);

  attr device_attr;
  device_attr.iface = gloo_iface_;

  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);
  auto host_env = std::getenv(HOROVOD_HOSTNAME);

  attr device_attr;
  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
  timeout_ = global_context.timeout_;
""",
    "horovod/common/common.h": """\
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
""",
    "horovod/common/group_table.h": """\
#include <mutex>
#include <queue>
#include <unordered_map>
#include <vector>
""",
    "horovod/runner/js_run.py": """\
from horovod.runner.util import lsf
from distutils.spawn import find_executable
from horovod.runner.mpi_run import _get_mpi_implementation_flags, _MPI_NOT_FOUND_ERROR_MSG
""",
    "third_party/gloo/gloo/transport/tcp/pair.cc": """\
#include <algorithm>
#include <sstream>

  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);
  if (!lock) {
    return;
  }
""",
    "horovod/common/tensor_queue.h": """\
#include <iostream>
#include <mutex>
#include <queue>

  void FinalizeTensorQueue(const Status& status);

  mutable std::mutex mutex_;
};
""",
    "horovod/common/tensor_queue.cc": """\
  tensor_table_.emplace(e.tensor_name, std::move(e));
  message_queue_.push(std::move(message));
  return Status::OK();
}

    tensor_table_.emplace(entries[i].tensor_name, std::move(entries[i]));
    message_queue_.push(std::move(messages[i]));
  }
  return Status::OK();
}
""",
    "horovod/common/operations.cc": """\
                        start_time;
  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    std::this_thread::sleep_for(sleep_duration);
  }
""",
    # Other operations have the first two lines too; only the all-reduce goes on like this.
    "horovod/tensorflow/mpi_ops.cc": """\
// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#else
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
#endif // HAVE_GPU
    auto tensor = context->input(0);
    horovod::common::ReduceOp reduce_op = static_cast<horovod::common::ReduceOp>(reduce_op_);
    Tensor* output;
    OP_REQUIRES_OK_ASYNC(
        context, context->allocate_output(0, tensor.shape(), &output), done);
    // ReadyEvent makes sure input tensor is ready, and output is allocated.
""",
    "horovod/common/ops/gloo_operations.cc": """\
    buffer_data = (void*)first_entry.output->data();
    std::memcpy(buffer_data, first_entry.tensor->data(),
                (size_t)first_entry.tensor->size());
    fused_input_data = buffer_data;
  }

  if (prescale_factor != 1.0) {
    // Execute prescaling op
""",
}
NEEDED_FILES = {edit.file for edit in NEEDED}
GPU_FILES = {edit.file for edit in GPU}


@pytest.fixture
def tree(tmp_path):
    for name, text in SOURCE.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_what_compiling_needs_changes_its_places_and_nothing_else(tree):
    patch.apply(tree, NEEDED)
    added, removed = [], []
    for name, text in SOURCE.items():
        old, new = text.splitlines(), (tree / name).read_text().splitlines()
        removed += [line for line in old if old.count(line) > new.count(line)]
        added += [line for line in new if new.count(line) > old.count(line)]
    xla = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")'
    assert set(removed) == {
        xla,
        "  device_attr.iface = gloo_iface_;",
        "from distutils.spawn import find_executable",
    }
    assert sorted(added) == [
        "  device_attr.iface = global_context.gloo_iface_;",
        "#include <stdexcept>",
        "#include <string>",
        "from shutil import which as find_executable",
    ]


def test_what_makes_it_faster_stays_out_of_the_files_that_compiling_needs(tree):
    patch.apply(tree, FASTER)
    changed = {name for name, text in SOURCE.items() if (tree / name).read_text() != text}
    assert changed == {edit.file for edit in FASTER}
    assert not changed & NEEDED_FILES


def test_a_build_with_nccl_changes_four_places_on_top(tree):
    patch.apply(tree, EDITS)
    before = {name: (tree / name).read_text().splitlines() for name in GPU_FILES}
    patch.apply(tree, GPU)
    added = []
    for name, old in before.items():
        added += [line for line in (tree / name).read_text().splitlines() if line not in old]
    assert sorted(line.strip() for line in added if line) == sorted(
        [
            '#include "xla/stream_executor/stream.h"',
            "static inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {",
            "return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);",
            "}",
            'set(NCCL_LIBNAME "libnccl.so.2")',
            "get_filename_component(NCCL_LIBRARY_DIR ${NCCL_LIBRARIES} DIRECTORY)",
            'list(APPEND LINKER_LIBS "-L${NCCL_LIBRARY_DIR}" "-l:${NCCL_LIBRARY_FILE_NAME}")',
            "set_target_properties(${TF_TARGET_LIB} PROPERTIES BUILD_RPATH "
            '"$ORIGIN/../../nvidia/nccl/lib")',
        ]
    )


def test_only_the_process_sets_interface_is_changed(tree):
    patch.apply(tree, EDITS)
    text = (tree / "horovod/common/gloo/gloo_context.cc").read_text()
    assert text.count("iface = gloo_iface_;") == 2
    assert text.index("global_context.gloo_iface_") > text.rindex("iface = gloo_iface_;")


@pytest.mark.parametrize("edit", EDITS + GPU, ids=lambda edit: edit.file)
def test_text_not_found_is_refused_and_nothing_is_written(tree, edit):
    (tree / edit.file).write_text("something else\n")
    with pytest.raises(BuildError) as caught:
        patch.apply(tree, EDITS + GPU)
    assert edit.file in str(caught.value)
    assert "0 times" in str(caught.value)
    for name in SOURCE:
        if name != edit.file:
            assert (tree / name).read_text() == SOURCE[name]


def test_patching_twice_is_refused(tree):
    patch.apply(tree, EDITS)
    with pytest.raises(BuildError, match="0 times"):
        patch.apply(tree, EDITS)


def test_text_found_twice_is_refused():
    edit = Edit("a.cc", "x = 1;\n", "x = 2;\n", "because")
    with pytest.raises(BuildError, match="2 times"):
        edit.on("x = 1;\nx = 1;\n")


def test_missing_file_is_refused(tree):
    (tree / EDITS[0].file).unlink()
    with pytest.raises(BuildError, match="CMakeLists.txt is missing"):
        patch.apply(tree, EDITS)


def test_two_edits_of_one_file_both_happen(tmp_path):
    (tmp_path / "a").write_text("one two")
    patch.apply(tmp_path, [Edit("a", "one", "1", ""), Edit("a", "two", "2", "")])
    assert (tmp_path / "a").read_text() == "1 2"


def test_fingerprint_follows_what_is_done_and_not_how_it_is_explained():
    explained = [dataclasses.replace(edit, why="for another reason") for edit in EDITS]
    assert patch.fingerprint(explained) == patch.fingerprint(EDITS)
    for field in ("file", "old", "new"):
        changed = [dataclasses.replace(EDITS[0], **{field: "other"}), *EDITS[1:]]
        assert patch.fingerprint(changed) != patch.fingerprint(EDITS)
