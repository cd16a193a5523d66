/* The fast way of a module's output into its row, and tables of many tensors, without Python code per tensor.
 *
 * A tensor's address, shape, dtype, device and stream come through DLPack's C exchange API (torch >= 2.11), so libtorch is not
 * linked and one build serves all versions of CPython from 3.11 on. `Outputs.take` handles the ordinary case only: a plain,
 * dense tensor of a known module, on the device and stream whose arena is open, in the thread of the pass. Everything else it
 * leaves to the Python code, by returning False; both give the same rows, bit for bit.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "outputs.h"

/* ---- DLPack's exchange API: the part that is needed, laid out as dlpack.h does ----------------------------------- */

typedef struct { uint32_t major, minor; } Version;
typedef struct { int32_t type, index; } Device;
typedef struct { uint8_t code, bits; uint16_t lanes; } DType;
typedef struct {
    void *data;
    Device device;
    int32_t ndim;
    DType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;
typedef struct Header { Version version; struct Header *previous; } Header;
typedef struct {
    Header header;
    void *allocate, *from_object, *to_object;
    int (*tensor_of)(void *object, Tensor *out); /* borrows; fails for whatever has no memory to point at */
    int (*current_stream)(int32_t type, int32_t index, void **out);
} Exchange;

enum { DL_CPU = 1, DL_CUDA = 2, DL_FLOAT = 2, DL_BFLOAT = 4, SUPPORTED_MAJOR = 1 };
enum { MOST_AXES = 16 };
enum { INTERFACE = 4 }; /* raised whenever a method takes other arguments: stats/outputs.py refuses an older build */

static Exchange *exchange;
static PyObject *tensor_type, *parameter_type, *backward_id;
static PyObject *name_is_neg, *name_version, *name_training;

/* ---- one tensor --------------------------------------------------------------------------------------------------- */

typedef struct {
    void *data;
    int64_t numel;
    int format; /* an enum format of summary.h */
    Device device;
} Place;

static int format_of_dtype(DType dtype)
{
    if (dtype.lanes != 1)
        return -1;
    if (dtype.code == DL_BFLOAT && dtype.bits == 16)
        return BFLOAT16;
    if (dtype.code != DL_FLOAT)
        return -1;
    return dtype.bits == 32 ? FLOAT32 : dtype.bits == 16 ? FLOAT16 : dtype.bits == 64 ? FLOAT64 : -1;
}

static int is_contiguous(const Tensor *tensor)
{
    int64_t expected = 1;
    for (int axis = tensor->ndim - 1; axis >= 0; axis--) {
        if (tensor->shape[axis] != 1 && tensor->strides[axis] != expected)
            return 0;
        expected *= tensor->shape[axis];
    }
    return 1;
}

/* Whether the elements fill their stretch of memory exactly once, in whatever order of axes. */
static int is_dense(const Tensor *tensor)
{
    int64_t expected = 1;
    unsigned used = 0;
    if (!tensor->strides || is_contiguous(tensor))
        return 1;
    if (tensor->ndim > MOST_AXES)
        return 0;
    for (int found = 0; found < tensor->ndim; found++) {
        int next = -1;
        for (int axis = 0; axis < tensor->ndim && next < 0; axis++)
            if (!(used >> axis & 1) && (tensor->shape[axis] == 1 || tensor->strides[axis] == expected))
                next = axis;
        if (next < 0)
            return 0;
        used |= 1u << next;
        expected *= tensor->shape[next];
    }
    return 1;
}

/* 1 if the attribute or the result of a method without arguments is Python's True, 0 if it is anything else. */
static int is_negated(PyObject *tensor)
{
    PyObject *answer = PyObject_CallMethodObjArgs(tensor, name_is_neg, NULL);
    int negated = answer != Py_False;
    Py_XDECREF(answer);
    PyErr_Clear();
    return negated;
}

/* Where the elements of a plain, dense tensor lie; with `ordered` only of one whose axes are not permuted. Returns 0 for one that
 * Python must look at. */
static int find_place(PyObject *object, int ordered, Place *place)
{
    Tensor tensor;
    PyObject *type = (PyObject *)Py_TYPE(object);
    if (type != tensor_type && type != parameter_type)
        return 0;
    if (exchange->tensor_of(object, &tensor)) {
        PyErr_Clear();
        return 0;
    }
    place->format = format_of_dtype(tensor.dtype);
    if (place->format < 0 || !(ordered ? !tensor.strides || is_contiguous(&tensor) : is_dense(&tensor)) || is_negated(object))
        return 0;
    place->numel = 1;
    for (int axis = 0; axis < tensor.ndim; axis++)
        place->numel *= tensor.shape[axis];
    place->data = (char *)tensor.data + tensor.byte_offset;
    place->device = tensor.device;
    return place->numel == 0 || tensor.data != NULL;
}

/* ---- known modules: a table by address ---------------------------------------------------------------------------- */

enum { TRAIN, EVAL, NUM_PHASES };
enum { ANY_MODE = 2, NO_MODE = 3 };

typedef struct {
    PyObject *key; /* a module's address; never followed */
    int64_t row[NUM_PHASES]; /* -1 where the site is not known yet */
    int32_t calls[NUM_PHASES]; /* since numbering began anew */
    uint8_t bins[NUM_PHASES];
    uint8_t mode[NUM_PHASES]; /* in observed passes: the mode (0 or 1) in which Python need not see it, any, or none */
    uint8_t passes_on[NUM_PHASES]; /* whether it is known to return a tensor that was recorded just before */
} Entry;

typedef struct {
    PyObject_HEAD
    Entry *entries;
    size_t size, used; /* size is a power of two */
    /* The pass: who may use the fast way, and where rows go. */
    unsigned long thread;
    int in_pass, phase, observed; /* observed: Python looks at some modules in this pass */
    PyObject *outermost; /* the address of the module with which the pass ends: Python must see its output */
    struct arena arena;
    int64_t base;
    Device device;
    void *stream;
    int is_open;
    int64_t threads; /* that torch uses on the CPU */
    struct cuda_target cuda;
    /* The last output that was recorded, to notice a container that hands on its child's tensor. */
    PyObject *last; /* a weak reference, or NULL */
    int64_t last_version, last_site;
    uint64_t taken, nanoseconds, generation;
} Outputs;

static size_t slot_of(const Outputs *self, const PyObject *key)
{
    size_t at = ((uintptr_t)key >> 4) * 0x9E3779B97F4A7C15ull >> 20 & (self->size - 1);
    while (self->entries[at].key && self->entries[at].key != key)
        at = (at + 1) & (self->size - 1);
    return at;
}

static int grow(Outputs *self)
{
    Entry *old = self->entries;
    size_t old_size = self->size, size = old_size ? 2 * old_size : 64;
    Entry *entries = calloc(size, sizeof(Entry));
    if (!entries)
        return -1;
    self->entries = entries, self->size = size;
    for (size_t i = 0; i < old_size; i++)
        if (old[i].key)
            entries[slot_of(self, old[i].key)] = old[i];
    free(old);
    return 0;
}

static Entry *entry_of(Outputs *self, PyObject *key)
{
    if (!self->size)
        return NULL;
    Entry *entry = &self->entries[slot_of(self, key)];
    return entry->key ? entry : NULL;
}

/* ---- taking an output --------------------------------------------------------------------------------------------- */

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static int64_t version_of(PyObject *tensor)
{
    PyObject *number = PyObject_GetAttr(tensor, name_version);
    int64_t version = number ? PyLong_AsLongLong(number) : -1; /* a tensor made in inference mode has none */
    Py_XDECREF(number);
    PyErr_Clear();
    return version;
}

static int is_in_backward(void)
{
    PyObject *number = PyObject_CallNoArgs(backward_id);
    int64_t id = number ? PyLong_AsLongLong(number) : 0;
    Py_XDECREF(number);
    PyErr_Clear();
    return id != -1;
}

/* Whether this very tensor, unchanged, was recorded last: a container hands on what its child returned. */
static int is_last(const Outputs *self, PyObject *output, int64_t version)
{
    if (!self->last || version < 0 || version != self->last_version)
        return 0;
    PyObject *last = PyObject_CallNoArgs(self->last);
    int same = last == output;
    Py_XDECREF(last);
    PyErr_Clear();
    return same;
}

static int has_mode(PyObject *module, int mode)
{
    if (mode == ANY_MODE || mode == NO_MODE)
        return mode == ANY_MODE;
    PyObject *training = PyObject_GetAttr(module, name_training);
    int same = training == (mode ? Py_True : Py_False);
    Py_XDECREF(training);
    PyErr_Clear();
    return same;
}

/* Elements from which it is worth letting other Python threads run, and worth waking torch's threads. */
enum { RELEASE_FROM = 1 << 16, THREADS_FROM = 100000 };

/* Summarise a large CPU tensor while other threads run. The result goes into rows of our own first: the arena may be shipped
 * meanwhile. Merged into an empty row it is what measuring into that row gives, so other rows are left to Python. */
static int measure_apart(Outputs *self, const Place *place, int64_t row, int bins)
{
    struct summary result = {{0}, {0}};
    const struct arena own = {result.column, result.bins, 1};
    const struct task task = {place->data, NULL, place->numel, place->format, 0, 0};
    const uint64_t generation = self->generation;
    int failed;
    if (self->arena.rows[NUM_COLUMNS * row + SEEN] != 0)
        return 0;
    Py_BEGIN_ALLOW_THREADS
    failed = sonde_measure(&own, &task, 1, (place->numel >= THREADS_FROM ? self->threads : 1) << 1 | bins);
    Py_END_ALLOW_THREADS
    if (failed || generation != self->generation || !self->is_open || self->arena.rows[NUM_COLUMNS * row + SEEN] != 0)
        return 0;
    memcpy(self->arena.rows + NUM_COLUMNS * row, result.column, sizeof result.column);
    if (bins)
        memcpy(self->arena.bins + NUM_BINS * row, result.bins, sizeof result.bins);
    return 1;
}

static int measure_place(Outputs *self, const Place *place, int64_t row, int bins)
{
    if (place->device.type == DL_CUDA) {
        void *stream = NULL;
        if (exchange->current_stream(DL_CUDA, place->device.index, &stream) || stream != self->stream)
            return 0;
        return sonde_launch_single(&self->cuda, stream, place->data, place->numel, place->format, row, bins);
    }
    if (place->numel >= RELEASE_FROM)
        return measure_apart(self, place, row, bins);
    return sonde_measure_one(&self->arena, place->data, place->numel, row << 3 | (int64_t)place->format << 1 | bins) == 0;
}

static int count_call(Outputs *self, PyObject *module, int phase)
{
    Entry *known = entry_of(self, module);
    if (known)
        known->calls[phase]++;
    return 1;
}

static int take_output(Outputs *self, PyObject *module, PyObject *output)
{
    Place place;
    const int phase = self->phase;
    if (!self->in_pass || !self->is_open || module == self->outermost || PyThread_get_thread_ident() != self->thread)
        return 0;
    const Entry *known = entry_of(self, module);
    if (!known || known->calls[phase] || (known->row[phase] < 0 && !known->passes_on[phase]))
        return 0;
    const Entry entry = *known; /* a copy: below, Python code or another thread may run and have the table grow */
    const int64_t row = entry.row[phase] - self->base;
    const int cuda = self->device.type == DL_CUDA;
    PyObject *type = (PyObject *)Py_TYPE(output);
    if ((type != tensor_type && type != parameter_type) || (self->observed && !has_mode(module, entry.mode[phase])) || is_in_backward())
        return 0;
    const int64_t version = version_of(output);
    if (is_last(self, output, version))
        return count_call(self, module, phase);
    if (row < 0 || row >= self->arena.capacity || !find_place(output, 0, &place))
        return 0;
    if (place.device.type != self->device.type || (cuda && place.device.index != self->device.index))
        return 0;
    PyObject *reference = PyWeakref_NewRef(output, NULL);
    if (!self->is_open || entry.row[phase] - self->base != row || row >= self->arena.capacity) { /* shipped meanwhile */
        Py_XDECREF(reference);
        return 0;
    }
    if (!reference || !measure_place(self, &place, row, entry.bins[phase])) {
        PyErr_Clear();
        Py_XDECREF(reference);
        return 0;
    }
    PyObject *before = self->last;
    self->last = reference;
    self->last_version = version;
    self->last_site = entry.row[phase];
    count_call(self, module, phase);
    Py_XDECREF(before);
    return 1;
}

/* ---- the type ----------------------------------------------------------------------------------------------------- */

static PyObject *outputs_take(Outputs *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "take() takes a module and its output");
        return NULL;
    }
    const uint64_t began = now();
    const int taken = take_output(self, args[0], args[1]);
    if (taken) {
        self->taken++;
        self->nanoseconds += now() - began;
    }
    return PyBool_FromLong(taken);
}

static Entry *entry_for(Outputs *self, PyObject *key)
{
    if (2 * (self->used + 1) > self->size && grow(self))
        return NULL;
    Entry *entry = &self->entries[slot_of(self, key)];
    if (!entry->key) {
        *entry = (Entry){.key = key, .row = {-1, -1}, .mode = {ANY_MODE, ANY_MODE}};
        self->used++;
    }
    return entry;
}

static int is_phase(long phase)
{
    if (phase == TRAIN || phase == EVAL)
        return 1;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a phase is 0 or 1");
    return 0;
}

static int is_mode(int mode)
{
    if (mode >= 0 && mode <= NO_MODE)
        return 1;
    PyErr_SetString(PyExc_ValueError, "a mode is 0, 1, 2 or 3");
    return 0;
}

/* know(module's id, phase, site, bins, mode): remember where the outputs of a module's first call go. */
static PyObject *outputs_know(Outputs *self, PyObject *args)
{
    Py_ssize_t key;
    long long site;
    int phase, bins, mode;
    if (!PyArg_ParseTuple(args, "niLii", &key, &phase, &site, &bins, &mode))
        return NULL;
    if (!is_phase(phase))
        return NULL;
    Entry *entry = is_mode(mode) ? entry_for(self, (PyObject *)key) : NULL;
    if (!entry)
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    entry->row[phase] = site;
    entry->bins[phase] = bins != 0;
    entry->mode[phase] = (uint8_t)mode;
    Py_RETURN_NONE;
}

/* know_passing(module's id, phase, mode): this module may return a tensor that was recorded just before. */
static PyObject *outputs_know_passing(Outputs *self, PyObject *args)
{
    Py_ssize_t key;
    int phase, mode;
    if (!PyArg_ParseTuple(args, "nii", &key, &phase, &mode) || !is_phase(phase))
        return NULL;
    Entry *entry = is_mode(mode) ? entry_for(self, (PyObject *)key) : NULL;
    if (!entry)
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    entry->passes_on[phase] = 1;
    entry->mode[phase] = (uint8_t)mode;
    Py_RETURN_NONE;
}

/* set_mode(module's id, phase, mode): Python looks at other modules than before. */
static PyObject *outputs_set_mode(Outputs *self, PyObject *args)
{
    Py_ssize_t key;
    int phase, mode;
    if (!PyArg_ParseTuple(args, "nii", &key, &phase, &mode) || !is_phase(phase) || !is_mode(mode))
        return NULL;
    Entry *entry = entry_of(self, (PyObject *)key);
    if (entry)
        entry->mode[phase] = (uint8_t)mode;
    Py_RETURN_NONE;
}

static void forget_last(Outputs *self)
{
    PyObject *last = self->last;
    self->last = NULL;
    self->last_version = self->last_site = -1;
    Py_XDECREF(last);
}

/* begin_pass(phase, id of the outermost module, whether Python looks at some modules in it) */
static PyObject *outputs_begin_pass(Outputs *self, PyObject *args)
{
    int phase, observed;
    Py_ssize_t outermost;
    if (!PyArg_ParseTuple(args, "inp", &phase, &outermost, &observed) || !is_phase(phase))
        return NULL;
    self->phase = phase;
    self->observed = observed;
    self->outermost = (PyObject *)outermost;
    self->thread = PyThread_get_thread_ident();
    self->in_pass = 1;
    forget_last(self);
    Py_RETURN_NONE;
}

static PyObject *outputs_end_pass(Outputs *self, PyObject *unused)
{
    self->in_pass = 0;
    forget_last(self);
    Py_RETURN_NONE;
}

/* clear_calls(phase): number calls from 0 again. */
static PyObject *outputs_clear_calls(Outputs *self, PyObject *phase)
{
    const long number = PyLong_AsLong(phase);
    if (!is_phase(number))
        return NULL;
    for (size_t i = 0; i < self->size; i++)
        self->entries[i].calls[number] = 0;
    Py_RETURN_NONE;
}

/* count(module's id, phase): count a call that Python handles, and return its number. */
static PyObject *outputs_count(Outputs *self, PyObject *args)
{
    Py_ssize_t key;
    int phase;
    if (!PyArg_ParseTuple(args, "ni", &key, &phase) || !is_phase(phase))
        return NULL;
    Entry *entry = entry_for(self, (PyObject *)key);
    return entry ? PyLong_FromLong(entry->calls[phase]++) : PyErr_NoMemory();
}

/* calls(module's id, phase): how many calls there were since numbering began anew. */
static PyObject *outputs_calls(Outputs *self, PyObject *args)
{
    Py_ssize_t key;
    int phase;
    if (!PyArg_ParseTuple(args, "ni", &key, &phase) || !is_phase(phase))
        return NULL;
    const Entry *entry = entry_of(self, (PyObject *)key);
    return PyLong_FromLong(entry ? entry->calls[phase] : 0);
}

/* open_cpu(rows, bins, capacity, base, threads): rows of CPU tensors go into this arena until `close`. */
static PyObject *outputs_open_cpu(Outputs *self, PyObject *args)
{
    unsigned long long rows, bins;
    long long capacity, base, threads;
    if (!PyArg_ParseTuple(args, "KKLLL", &rows, &bins, &capacity, &base, &threads))
        return NULL;
    self->threads = threads;
    self->arena = (struct arena){(double *)(uintptr_t)rows, (uint64_t *)(uintptr_t)bins, capacity};
    self->base = base;
    self->device = (Device){DL_CPU, 0};
    self->stream = NULL;
    self->is_open = 1;
    self->generation++;
    Py_RETURN_NONE;
}

/* open_cuda(index, stream, (rows, bins, partials, tickets), capacity, base, blocks, launch, capturing, functions)
 * `functions` holds a kernel for each element type without and with bins: addresses, 0 where there is none. */
static PyObject *outputs_open_cuda(Outputs *self, PyObject *args)
{
    int index;
    unsigned blocks;
    unsigned long long stream, rows, bins, partials, tickets, launch, capturing;
    long long capacity, base;
    PyObject *functions;
    if (!PyArg_ParseTuple(args, "iK(KKKK)LLIKKO", &index, &stream, &rows, &bins, &partials, &tickets, &capacity, &base, &blocks,
                          &launch, &capturing, &functions))
        return NULL;
    if (PySequence_Size(functions) != 2 * NUM_FORMATS) {
        PyErr_SetString(PyExc_ValueError, "open_cuda() takes two functions for each element type");
        return NULL;
    }
    for (int i = 0; i < 2 * NUM_FORMATS; i++) {
        PyObject *address = PySequence_GetItem(functions, i);
        self->cuda.functions[i] = address ? PyLong_AsVoidPtr(address) : NULL;
        Py_XDECREF(address);
        if (PyErr_Occurred())
            return NULL;
    }
    self->cuda.rows = rows, self->cuda.bins = bins, self->cuda.partials = partials, self->cuda.tickets = tickets;
    self->cuda.blocks = blocks;
    self->cuda.launch = (launch_function *)(uintptr_t)launch;
    self->cuda.is_capturing = (capturing_function *)(uintptr_t)capturing;
    self->arena = (struct arena){NULL, NULL, capacity};
    self->base = base;
    self->device = (Device){DL_CUDA, index};
    self->stream = (void *)(uintptr_t)stream;
    self->is_open = 1;
    self->generation++;
    Py_RETURN_NONE;
}

static PyObject *outputs_close(Outputs *self, PyObject *unused)
{
    self->is_open = 0;
    self->generation++;
    Py_RETURN_NONE;
}

/* last(): the last output that was taken, as (weak reference or None, version, site). */
static PyObject *outputs_last(Outputs *self, PyObject *unused)
{
    return Py_BuildValue("OLL", self->last ? self->last : Py_None, (long long)self->last_version, (long long)self->last_site);
}

static PyObject *outputs_set_last(Outputs *self, PyObject *args)
{
    PyObject *reference;
    long long version, site;
    if (!PyArg_ParseTuple(args, "OLL", &reference, &version, &site))
        return NULL;
    forget_last(self);
    Py_INCREF(reference);
    self->last = reference;
    self->last_version = version;
    self->last_site = site;
    Py_RETURN_NONE;
}

static void outputs_dealloc(Outputs *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    free(self->entries);
    Py_XDECREF(self->last);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *outputs_get_taken(Outputs *self, void *unused) { return PyLong_FromUnsignedLongLong(self->taken); }
static PyObject *outputs_get_seconds(Outputs *self, void *unused) { return PyFloat_FromDouble((double)self->nanoseconds * 1e-9); }

static PyMethodDef outputs_methods[] = {
    {"take", (PyCFunction)(void *)outputs_take, METH_FASTCALL, "take(module, output) -> whether the output was recorded"},
    {"know", (PyCFunction)outputs_know, METH_VARARGS, "know(key, phase, site, bins, mode)"},
    {"know_passing", (PyCFunction)outputs_know_passing, METH_VARARGS, "know_passing(key, phase, mode)"},
    {"set_mode", (PyCFunction)outputs_set_mode, METH_VARARGS, "set_mode(key, phase, mode)"},
    {"begin_pass", (PyCFunction)outputs_begin_pass, METH_VARARGS, "begin_pass(phase, outermost, observed): a recorded pass of this thread begins"},
    {"end_pass", (PyCFunction)outputs_end_pass, METH_NOARGS, "the pass has ended"},
    {"clear_calls", (PyCFunction)outputs_clear_calls, METH_O, "clear_calls(phase): number calls from 0 again"},
    {"count", (PyCFunction)outputs_count, METH_VARARGS, "count(key, phase) -> the number of a call that Python handles"},
    {"calls", (PyCFunction)outputs_calls, METH_VARARGS, "calls(key, phase) -> calls since numbering began anew"},
    {"open_cpu", (PyCFunction)outputs_open_cpu, METH_VARARGS, "open_cpu(rows, bins, capacity, base, threads)"},
    {"open_cuda", (PyCFunction)outputs_open_cuda, METH_VARARGS, "open_cuda(index, stream, addresses, capacity, base, blocks, launch, capturing, functions)"},
    {"close", (PyCFunction)outputs_close, METH_NOARGS, "the arena is about to be shipped"},
    {"last", (PyCFunction)outputs_last, METH_NOARGS, "last() -> (weak reference or None, version, site)"},
    {"set_last", (PyCFunction)outputs_set_last, METH_VARARGS, "set_last(weak reference, version, site)"},
    {0},
};

static PyGetSetDef outputs_getset[] = {
    {"taken", (getter)outputs_get_taken, NULL, "outputs taken so far", NULL},
    {"seconds", (getter)outputs_get_seconds, NULL, "time spent taking them", NULL},
    {0},
};

static PyType_Slot outputs_slots[] = {
    {Py_tp_doc, "Writes the outputs of known modules into the rows of an open arena."},
    {Py_tp_methods, outputs_methods},
    {Py_tp_getset, outputs_getset},
    {Py_tp_dealloc, (void *)outputs_dealloc},
    {0},
};
static PyType_Spec outputs_spec = {"sonde.stats._native.Outputs", sizeof(Outputs), 0, Py_TPFLAGS_DEFAULT, outputs_slots};

/* ---- tables of many tensors --------------------------------------------------------------------------------------- */

static int is_on(Device device, int type, int index) { return device.type == type && (type == DL_CPU || device.index == index); }

/* Fill in one row of a table: address, address of the shadow, length, format. Returns 0 for what Python must look at. */
static int fill_row(PyObject *tensor, PyObject *shadow, int type, int index, int64_t *row)
{
    Place now, before;
    if (!tensor || !find_place(tensor, shadow != NULL, &now) || !is_on(now.device, type, index))
        return 0;
    if (shadow && (!find_place(shadow, 1, &before) || !is_on(before.device, type, index) || now.numel != before.numel ||
                   now.format != before.format))
        return 0;
    row[0] = (int64_t)(intptr_t)now.data;
    row[1] = shadow ? (int64_t)(intptr_t)before.data : 0;
    row[2] = now.numel;
    row[3] = now.format | (shadow ? WITH_CHANGE : 0);
    return 1;
}

/* fill(tensors, shadows or None, table, width, device type, device index) -> indices of tensors that Python must look at.
 * The table is a buffer of 64-bit numbers with `width` of them for each tensor, of which the first four are written. */
static PyObject *fill(PyObject *module, PyObject *args)
{
    PyObject *tensors, *shadows, *buffer;
    int width, type, index;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "OOOiii", &tensors, &shadows, &buffer, &width, &type, &index))
        return NULL;
    if (PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE | PyBUF_SIMPLE))
        return NULL;
    const Py_ssize_t count = PySequence_Size(tensors);
    PyObject *left = count < 0 ? NULL : PyList_New(0);
    if (left && (width < 4 || view.len < (Py_ssize_t)(count * width * 8))) {
        PyErr_SetString(PyExc_ValueError, "the table is too small");
        Py_CLEAR(left);
    }
    for (Py_ssize_t i = 0; left && i < count; i++) {
        PyObject *tensor = PySequence_GetItem(tensors, i);
        PyObject *shadow = shadows == Py_None || !tensor ? NULL : PySequence_GetItem(shadows, i);
        if (PyErr_Occurred()) {
            Py_CLEAR(left);
        } else if (!fill_row(tensor, shadow, type, index, (int64_t *)view.buf + i * width)) {
            PyObject *number = PyLong_FromSsize_t(i);
            if (!number || PyList_Append(left, number))
                Py_CLEAR(left);
            Py_XDECREF(number);
        }
        Py_XDECREF(tensor);
        Py_XDECREF(shadow);
    }
    PyBuffer_Release(&view);
    return left;
}

/* connect(exchange API, Tensor, Parameter, function that returns the id of the running backward pass) */
static PyObject *connect(PyObject *module, PyObject *args)
{
    PyObject *capsule, *tensor, *parameter, *backward;
    if (!PyArg_ParseTuple(args, "OOOO", &capsule, &tensor, &parameter, &backward))
        return NULL;
    Exchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!found)
        return NULL;
    if (found->header.version.major != SUPPORTED_MAJOR || !found->tensor_of || !found->current_stream) {
        PyErr_Format(PyExc_RuntimeError, "DLPack %u.%u is not supported", found->header.version.major, found->header.version.minor);
        return NULL;
    }
    Py_INCREF(tensor), Py_INCREF(parameter), Py_INCREF(backward);
    tensor_type = tensor, parameter_type = parameter, backward_id = backward; /* never released: one process, one torch */
    exchange = found;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"connect", connect, METH_VARARGS, "connect(capsule, Tensor, Parameter, backward_id): use torch's exchange API"},
    {"fill", fill, METH_VARARGS, "fill(tensors, shadows or None, table, width, device type, device index) -> indices left out"},
    {0},
};

static int prepare(PyObject *module)
{
    name_is_neg = PyUnicode_InternFromString("is_neg");
    name_version = PyUnicode_InternFromString("_version");
    name_training = PyUnicode_InternFromString("training");
    if (!name_is_neg || !name_version || !name_training)
        return -1;
    if (PyModule_AddIntConstant(module, "INTERFACE", INTERFACE))
        return -1;
    PyObject *type = PyType_FromSpec(&outputs_spec);
    if (!type || PyModule_AddObject(module, "Outputs", type)) {
        Py_XDECREF(type);
        return -1;
    }
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)prepare}, {0}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "sonde.stats._native",
    .m_doc = "Summaries of CPU tensors, and the fast way of outputs into rows.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
