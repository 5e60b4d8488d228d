// The direct way of lngen.torch in C++: calls that lngen/launch/direct.py has prepared, and recognised, are launched here.
//
//   make(driver, ...) -> call                 once for each prepared call, from plain data (lngen/torch/extension.py)
//   call(stream, *tensors) -> results         None if the call has to go the way of direct.py, as if nothing had happened
//
// A call has no state that changes, but for the kernels of its backward, which come with the first gradient. So all
// threads share it. It links no CUDA: the driver's cuLaunchKernelEx is given as an address.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided_ops.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Numbers = std::vector<int64_t>;
using Given = c10::SmallVector<const Tensor*, 8>;

constexpr uintptr_t widest = 16;  // bytes of the widest memory access

// ---- a launch: the structures of cuda.h, as lngen/launch/driver.py has them ----

struct Attribute {
  unsigned id, pad, value[16];
};

struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  const Attribute* attributes;
  unsigned count;
};

using Driver = int (*)(const Config*, void* function, void** arguments, void** extra);

struct Launch {
  Config config;
  std::vector<Attribute> attributes;
  void* function;
  Numbers slots;  // of its arguments in the block

  explicit Launch(const py::tuple& given)
      : function(reinterpret_cast<void*>(given[0].cast<uintptr_t>())), slots(given[3].cast<Numbers>()) {
    const auto bytes = given[1].cast<std::string>(), listed = given[2].cast<std::string>();
    TORCH_CHECK(bytes.size() == sizeof config && listed.size() % sizeof(Attribute) == 0, "not the driver's structures");
    std::memcpy(&config, bytes.data(), sizeof config);
    attributes.resize(listed.size() / sizeof(Attribute));
    std::memcpy(attributes.data(), listed.data(), listed.size());
  }

  int operator()(Driver driver, void* stream, int64_t* block) const {
    c10::SmallVector<void*, 32> arguments;
    for (const auto slot : slots) arguments.push_back(block + slot);
    auto now = config;
    now.stream = stream;
    now.attributes = attributes.data();
    return driver(&now, function, arguments.data(), nullptr);
  }
};

// ---- tensors ----

Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, const Tensor& like) {
  const auto device = like.device();
  const auto backend = c10::DispatchKeySet(c10::computeDispatchKey(dtype, c10::kStrided, device));
  return at::_ops::empty_strided::redispatch(
      backend, c10::fromIntArrayRefUnchecked(sizes), c10::fromIntArrayRefUnchecked(strides), dtype, c10::kStrided,
      device, false);
}

struct Layout {
  Numbers sizes, strides;
  at::ScalarType dtype;

  explicit Layout(const py::tuple& given)
      : sizes(given[0].cast<Numbers>()), strides(given[1].cast<Numbers>()) {
    TORCH_CHECK(THPDtype_Check(py::object(given[2]).ptr()), "not a dtype");
    dtype = reinterpret_cast<THPDtype*>(py::object(given[2]).ptr())->scalar_type;
  }

  // A new tensor. Columns that are further apart than what lies in them all have that much memory.
  Tensor make(const Tensor& like) const {
    const auto whole = sizes.empty() ? 1 : sizes[0] * strides[0];
    if (whole <= c10::multiply_integers(sizes)) return empty(sizes, strides, dtype, like);
    auto made = empty({whole}, {1}, dtype, like);
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    return made;
  }

  // True for a tensor like this one, with the dispatch keys of a plain tensor: no subclass, transform or lazy sign.
  bool fits(const Tensor& tensor, c10::DispatchKeySet keys, c10::Device device) const {
    return tensor.defined() && tensor.key_set() == keys && tensor.device() == device &&
        tensor.scalar_type() == dtype && tensor.sizes().equals(sizes) && tensor.strides().equals(strides);
  }
};

template <class T>
std::vector<T> listed(const py::handle& given) {
  std::vector<T> found;
  for (const auto& one : given) found.emplace_back(py::reinterpret_borrow<py::tuple>(one));
  return found;
}

// An object of Python's, which may be let go without the GIL.
c10::SafePyObject held(const py::handle& object) { return {object.inc_ref().ptr(), getPyInterpreter()}; }

// ---- the kernels of a side ----

// The block has the addresses of what is given, of ``more`` places in a tensor of numbers, of the results, and of the
// places of numbers that the results share a tensor for; then what is the same in all calls.
class Kernels {
 public:
  explicit Kernels(const py::tuple& plan)
      : launches_(listed<Launch>(plan[1])), buffers_(plan[2].cast<std::vector<std::pair<size_t, int64_t>>>()),
        workspace_(plan[3].cast<int64_t>()), more_(plan[4].cast<Numbers>()), results_(listed<Layout>(plan[5])),
        offsets_(plan[6].cast<Numbers>()), numbers_(listed<Layout>(plan[7])), plan_(held(plan)) {
    const auto bytes = plan[0].cast<std::string>();
    block_.resize(bytes.size() / sizeof(int64_t));
    std::memcpy(block_.data(), bytes.data(), bytes.size());
  }

  const std::vector<Layout>& numbers() const { return numbers_; }

  // Results, and the tensor of numbers after them; false if the kernels were not launched, all of them.
  bool run(Driver driver, void* stream, const Given& given, const Tensor& numbers, variable_list& results) const {
    const auto& like = *given[0];
    c10::SmallVector<int64_t, 64> block(block_.begin(), block_.end());
    auto* slot = block.data();
    int64_t together = 0;
    for (const auto* tensor : given) together |= *slot++ = reinterpret_cast<int64_t>(tensor->const_data_ptr());
    for (const auto offset : more_) *slot++ = reinterpret_cast<int64_t>(numbers.const_data_ptr()) + offset;
    results.reserve(results_.size() + 1);
    for (const auto& layout : results_) {
      results.push_back(layout.make(like));
      together |= *slot++ = reinterpret_cast<int64_t>(results.back().mutable_data_ptr());
    }
    for (const auto& layout : numbers_) {
      results.push_back(layout.make(like));
      for (const auto offset : offsets_) *slot++ = reinterpret_cast<int64_t>(results.back().mutable_data_ptr()) + offset;
    }
    if (together % widest != 0) return false;
    Tensor workspace;  // in the order of the stream, so it may be let go before the kernels have run
    if (workspace_ != 0) {
      workspace = empty({workspace_}, {1}, at::kByte, like);
      const auto address = reinterpret_cast<int64_t>(workspace.mutable_data_ptr());
      for (const auto& [at, offset] : buffers_) block[at] = address + offset;
    }
    for (const auto& launch : launches_) {
      if (launch(driver, stream, block.data()) != 0) return false;
    }
    return true;
  }

 private:
  std::vector<Launch> launches_;
  std::vector<std::pair<size_t, int64_t>> buffers_;  // slots, and offsets in the workspace
  int64_t workspace_;                                 // its bytes
  Numbers more_;                                      // offsets
  std::vector<Layout> results_;
  Numbers offsets_;
  std::vector<Layout> numbers_;  // one or none
  Numbers block_;
  c10::SafePyObject plan_;  // which has the module of the kernels
};

// ---- a call ----

struct Call : std::enable_shared_from_this<Call> {
  Driver driver;
  size_t count;                         // of the tensors given
  Kernels inference;
  std::unique_ptr<const Kernels> saving;  // null if nothing has a gradient
  std::vector<Layout> taken;            // by backward: gradients of the outputs, what is kept, the tensor of numbers
  Numbers kept;                         // what backward reads of the tensors given, and of the outputs after them
  Numbers places;                       // of the gradients of what is given among the results of backward, or -1
  c10::SafePyObject gradients;          // (gradients, kept, numbers) -> gradients, by direct.py
  c10::SafePyObject prepare;            // the same arguments -> the plan of backward, or None
  mutable std::atomic<const Kernels*> backward{nullptr};
  mutable std::atomic<bool> refused{false};  // there is no such plan

  Call(uintptr_t address, size_t tensors, const py::tuple& first, const py::object& second, const py::list& layouts,
       Numbers saved, Numbers found, const py::object& general, const py::object& planned)
      : driver(reinterpret_cast<Driver>(address)), count(tensors), inference(first),
        saving(second.is_none() ? nullptr : std::make_unique<const Kernels>(second)), taken(listed<Layout>(layouts)),
        kept(std::move(saved)), places(std::move(found)), gradients(held(general)), prepare(held(planned)) {
    if (saving) taken.insert(taken.end(), saving->numbers().begin(), saving->numbers().end());
  }

  ~Call() { delete backward.load(); }

  // The outputs; false as of Kernels::run.
  bool operator()(void* stream, const Given& given, variable_list& results) const;

  // True for tensors that backward's kernels take.
  bool fit(const variable_list& tensors, c10::DispatchKeySet keys, c10::Device device) const {
    for (size_t n = 0; n < taken.size(); ++n) {
      if (!taken[n].fits(tensors[n], keys, device)) return false;
    }
    return true;
  }
};

// What direct.py is asked with: gradients, what is kept, the tensor of numbers or None.
py::object asked(const c10::SafePyObject& function, const Call& call, const variable_list& tensors, size_t gradients) {
  py::list lists[2];
  const auto end = gradients + call.kept.size();
  for (size_t n = 0; n < end; ++n) {
    lists[n >= gradients].append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensors[n])));
  }
  auto numbers = end < tensors.size() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(tensors[end])) : py::none();
  auto* found = PyObject_CallFunctionObjArgs(
      function.ptr(getPyInterpreter()), lists[0].ptr(), lists[1].ptr(), numbers.ptr(), nullptr);
  if (found == nullptr) {
    python_error error;
    error.persist();
    throw error;
  }
  return py::reinterpret_steal<py::object>(found);
}

// ---- its place in the graph of gradients ----

c10::Stream current_of(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

class Backward : public Node {
 public:
  Backward(std::shared_ptr<const Call> call, void* stream, const Tensor& result)
      : call_(std::move(call)), stream_(stream), current_(current_of(result.device())), keys_(result.key_set()) {}

  std::string name() const override { return "LngenBackward"; }

  void save(const Given& given, const variable_list& results) {
    saved_.reserve(call_->kept.size() + 1);
    for (const size_t n : call_->kept) {
      const bool output = n >= given.size();
      saved_.emplace_back(output ? results[n - given.size()] : *given[n], output);
    }
    if (!call_->saving->numbers().empty()) saved_.emplace_back(results.back(), false);
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& one : saved_) one.reset_data();
  }

  variable_list apply(variable_list&& tensors) override {
    const auto outputs = tensors.size();
    bool all = true, none = true;
    for (const auto& gradient : tensors) (gradient.defined() ? none : all) = false;
    if (none) return variable_list(call_->count);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& one : saved_) tensors.push_back(one.unpack(getptr()));
    }
    variable_list results;
    if (!all || !launched(tensors, outputs, results)) return by_python(tensors, outputs);
    variable_list found(call_->count);
    for (size_t n = 0; n < found.size(); ++n) {
      if (call_->places[n] >= 0) found[n] = results[call_->places[n]];
    }
    return found;
  }

 private:
  bool launched(const variable_list& tensors, size_t outputs, variable_list& results) {
    const auto modes = c10::impl::tls_local_dispatch_key_set().included_;  // what is excluded, no kernel would see
    if (at::GradMode::is_enabled() || modes != c10::default_included_set ||
        !call_->fit(tensors, keys_, current_.device()) || current_of(current_.device()) != current_) {
      return false;
    }
    const auto* kernels = prepared(tensors, outputs);
    if (kernels == nullptr) return false;
    Given given;
    for (size_t n = 0; n < outputs + call_->kept.size(); ++n) given.push_back(&tensors[n]);
    return kernels->run(call_->driver, stream_, given, tensors.back(), results);
  }

  // The kernels, which direct.py prepares for the first gradient; null if it has none that can be launched from here.
  const Kernels* prepared(const variable_list& tensors, size_t outputs) {
    const auto* known = call_->backward.load();
    if (known != nullptr || call_->refused) return known;
    const py::gil_scoped_acquire gil;
    const auto plan = asked(call_->prepare, *call_, tensors, outputs);
    if (plan.is_none()) {
      call_->refused = true;
      return nullptr;
    }
    auto made = std::make_unique<const Kernels>(plan);
    if (call_->backward.compare_exchange_strong(known, made.get())) known = made.release();
    return known;
  }

  variable_list by_python(const variable_list& tensors, size_t outputs) {
    const py::gil_scoped_acquire gil;
    variable_list found;
    for (const auto& one : asked(call_->gradients, *call_, tensors, outputs)) {
      found.push_back(one.is_none() ? Tensor() : THPVariable_Unpack(one.ptr()));
    }
    return found;
  }

  std::shared_ptr<const Call> call_;
  void* stream_;
  c10::Stream current_;  // the same, for PyTorch
  c10::DispatchKeySet keys_;  // of a plain tensor
  std::vector<SavedVariable> saved_;
};

// PyTorch's own kind of pointer to a node, which depends on its version.
template <class Pointer, class N, class... Arguments>
Pointer node_of(Arguments&&... arguments) {
  if constexpr (std::is_constructible_v<Pointer, N*, void (*)(Node*)>) {
    return Pointer(new N(std::forward<Arguments>(arguments)...), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<N>(std::forward<Arguments>(arguments)...);
  }
}

bool Call::operator()(void* stream, const Given& given, variable_list& results) const {
  if (saving == nullptr || !at::GradMode::is_enabled()) return inference.run(driver, stream, given, {}, results);
  if (!saving->run(driver, stream, given, {}, results)) return false;
  auto node = node_of<decltype(std::declval<Node>().getptr()), Backward>(shared_from_this(), stream, results[0]);
  torch::autograd::edge_list edges;
  for (const auto* tensor : given) edges.push_back(torch::autograd::impl::gradient_edge(*tensor));
  node->set_next_edges(std::move(edges));
  const auto outputs = results.size() - saving->numbers().size();
  for (size_t n = 0; n < outputs; ++n) torch::autograd::set_history(results[n], node);
  static_cast<Backward&>(*node).save(given, results);
  results.resize(outputs);
  return true;
}

// ---- for Python ----

constexpr const char* capsule = "lngen call";

PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const auto& one = **static_cast<std::shared_ptr<Call>*>(PyCapsule_GetPointer(self, capsule));
  TORCH_CHECK(static_cast<size_t>(count) == one.count + 1, "a stream and ", one.count, " tensors are expected");
  auto* stream = PyLong_AsVoidPtr(arguments[0]);
  if (stream == nullptr && PyErr_Occurred()) return nullptr;
  Given given;
  for (Py_ssize_t n = 1; n < count; ++n) {
    TORCH_CHECK(THPVariable_Check(arguments[n]), "tensors are expected");
    given.push_back(&THPVariable_Unpack(arguments[n]));
  }
  variable_list results;
  {
    const py::gil_scoped_release no_gil;
    if (!one(stream, given, results)) results.clear();
  }
  if (results.empty()) Py_RETURN_NONE;
  auto found = py::reinterpret_steal<py::object>(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
  for (size_t n = 0; n < results.size(); ++n) {
    PyTuple_SET_ITEM(found.ptr(), static_cast<Py_ssize_t>(n), THPVariable_Wrap(std::move(results[n])));
  }
  return found.release().ptr();
  END_HANDLE_TH_ERRORS
}

PyMethodDef method = {
    "call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL, "(stream, *tensors) -> results"};

// A function of Python's that has a call as its ``self``: no other kind of object is called as fast.
py::object make(uintptr_t driver, size_t count, const py::tuple& inference, const py::object& saving,
                const py::list& taken, Numbers kept, Numbers places, const py::object& gradients,
                const py::object& prepare) {
  auto one = std::make_unique<std::shared_ptr<Call>>(std::make_shared<Call>(
      driver, count, inference, saving, taken, std::move(kept), std::move(places), gradients, prepare));
  const py::capsule self(one.get(), capsule, [](PyObject* object) {
    delete static_cast<std::shared_ptr<Call>*>(PyCapsule_GetPointer(object, capsule));
  });
  one.release();
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("make", &make); }
