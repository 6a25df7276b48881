#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "background_thread.h"
#include "bindings.h"
#include "ddp_hook.h"
#include "holders.h"

namespace gradferry {
namespace {

// DDP's Python hooks must deliver a Python object. This one is boxed while the hook still holds the
// GIL, so that the finishing thread can complete the Future without it.
class BoxedTensor final : public c10::ivalue::PyObjectHolder {
 public:
  explicit BoxedTensor(at::Tensor tensor)
      : tensor_(std::move(tensor)), object_(THPVariable_Wrap(tensor_)) {}
  ~BoxedTensor() override {
    // A job abandoned at exit may end while the interpreter does: then the object is leaked.
    if (process_is_ending) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(object_);
  }
  BoxedTensor(const BoxedTensor&) = delete;
  BoxedTensor& operator=(const BoxedTensor&) = delete;

  PyObject* getPyObject() override { return object_; }
  c10::InferredType tryToInferType() override { return c10::InferredType(c10::TensorType::get()); }
  c10::IValue toIValue(const c10::TypePtr& /*type*/, std::optional<int32_t> /*n*/) override {
    return tensor_;
  }
  std::string toStr() override { return "gradient bucket"; }
  std::vector<at::Tensor> extractTensors() override { return {tensor_}; }

 private:
  at::Tensor tensor_;
  PyObject* object_;
};

// Lends its Future to Python through Work.get_future().
class BucketWork final : public c10d::Work {
 public:
  explicit BucketWork(FuturePtr future) : future_(std::move(future)) {}
  FuturePtr getFuture() override { return future_; }

 private:
  FuturePtr future_;
};

std::shared_ptr<BucketHook> make_hook(std::shared_ptr<BucketEngine> engine,
                                      const std::vector<at::Tensor>& parameters,
                                      std::string group_name) {
  return std::make_shared<BucketHook>(std::move(engine), parameters, std::move(group_name),
                                      &make_torch_exception);
}

// A Python function for C++ to call and to let go of, with the GIL or without.
BucketHook::StepCallback make_callback(py::function function) {
  const std::shared_ptr<py::function> held(new py::function(std::move(function)),
                                           [](py::function* last) {
                                             // The interpreter may be gone: then it is leaked.
                                             if (process_is_ending) return;
                                             const py::gil_scoped_acquire gil;
                                             delete last;
                                           });
  return [held](const std::shared_ptr<BucketHook>& hook, uint64_t step) {
    const py::gil_scoped_acquire gil;
    (*held)(hook, step);
  };
}

c10::intrusive_ptr<c10d::Work> run_from_python(BucketHook& hook, const c10d::GradBucket& bucket) {
  auto future = make_future(c10::PyObjectType::get(), bucket.getBuffer());
  c10::intrusive_ptr<c10::ivalue::PyObjectHolder> boxed =
      c10::make_intrusive<BoxedTensor>(bucket.getBuffer());
  {
    const py::gil_scoped_release released;
    hook.run(bucket, future, c10::IValue(std::move(boxed)));
  }
  return c10::make_intrusive<BucketWork>(std::move(future));
}

}  // namespace

void bind_ddp_hook(py::module_& module) {
  module.def("reducer_parameters", &reducer_parameters, py::arg("reducer"));
  module.def("bucket_strides", &bucket_strides, py::arg("parameter"));
  module.def("reordered_since_buckets_were_made", &reordered_since_buckets_were_made,
             py::arg("reducer"));
  module.def("moved_since_buckets_were_made", &moved_since_buckets_were_made, py::arg("reducer"));
  py::class_<BucketHook, std::shared_ptr<BucketHook>> hook_class(module, "BucketHook");
  def_init(hook_class, &make_hook, py::kw_only(), py::arg("engine").none(true),
           py::arg("parameters"), py::arg("group_name"));
  hook_class
      .def(
          "attach",
          [](const std::shared_ptr<BucketHook>& hook, c10d::Reducer& reducer) {
            const py::gil_scoped_release released;
            reducer.register_comm_hook(std::make_unique<NativeHook>(hook));
          },
          py::arg("reducer"))
      .def(
          "watch_use",
          [](BucketHook& hook, const std::vector<at::Tensor>& parameters,
             const c10d::Reducer& reducer) {
            hook.watch_use(parameters, used_since_last_sync(reducer, parameters));
          },
          py::arg("parameters"), py::arg("reducer"))
      .def("end_steps_with_passes", &BucketHook::end_steps_with_passes)
      .def("use_engine", &BucketHook::use_engine, py::arg("engine").none(true))
      .def(
          "call_at",
          [](BucketHook& hook, uint64_t step, py::function callback, const std::string& purpose) {
            hook.call_at(step, make_callback(std::move(callback)), purpose);
          },
          py::arg("step"), py::arg("callback"), py::arg("purpose"))
      .def("resume", &BucketHook::resume, py::arg("step"))
      .def("finished_steps", &BucketHook::finished_steps)
      .def("admit", &BucketHook::admit, py::arg("bucket"), py::call_guard<py::gil_scoped_release>())
      .def("passed", &BucketHook::passed)
      .def("note_passed", &BucketHook::note_passed)
      .def("fail", &BucketHook::fail, py::arg("message"), py::call_guard<py::gil_scoped_release>())
      .def("fail_without_memory", &BucketHook::fail_without_memory,
           py::call_guard<py::gil_scoped_release>())
      .def("run", &run_from_python, py::arg("bucket"));
}

}  // namespace gradferry
