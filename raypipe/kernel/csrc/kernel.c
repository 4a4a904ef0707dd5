/* The images of a micro-batch in one call: the optional extension behind raypipe/kernel/extension.py.
 *
 *     sizes(images) -> bytes
 *         int32 (B, 3): height, width, and 1 where EXIF or XMP may turn it; 0, 0, 0 of pixels, and what run() does not take, by
 *         its header
 *     run(images, jobs, threads, to_end) -> bytes
 *         B statuses, see image.h. A job is (ops, params, out); each makes an image of each image.
 *             images   B objects: a JPEG (bytes-like), pixels (uint8, H x W x 3, up to MAX_PIXELS), or None
 *             ops      int32 (n, 2): a code, and where in a row of params its `apply` is
 *             params   int64 (B, P)
 *             out      uint8 (B, H, W, 3), writable, C-contiguous but for its first axis
 *     decode_crop(data, left, top, width, height, to_end, out, columns) -> first
 *         A rectangle of a JPEG. `out` is height x columns x 3 bytes, a few columns wider than the rectangle, which
 *         begins in column `first`. ValueError: refused.
 *     to_seekable(data) -> bytes
 *         A JPEG as a seekable one, see jpeg_seek.h. ValueError: refused.
 *     set_simd(level) -> level
 *         Use no more than these vector instructions (0 none, 1 SSSE3, 2 AVX2), for tests; what will be used.
 *
 * The interpreter is let go of while images are made, by `threads` threads that each take the next image. An image
 * has no effect on another one: neither its bytes nor its params, which are all untrusted.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bounds.h"
#include "jpeg_transcode.h"
#include "program.h"

#include <pthread.h>

/* Version of this interface; raypipe/kernel/extension.py accepts no other. */
#define INTERFACE_VERSION 8
#define MAX_THREADS 256

static int simd_level, most_simd;

/* Those that wait for a call; only touched by who holds the interpreter's lock. */
static Worker *idle_workers;

static Worker *take_worker(void)
{
    Worker *worker = idle_workers;
    if (worker)
        idle_workers = worker->next;
    else
        worker = calloc(1, sizeof *worker);
    return worker;
}

static void give_worker_back(Worker *worker)
{
    trim_worker(worker);
    worker->next = idle_workers;
    idle_workers = worker;
}

/* What a call is given, and what keeps it alive and as it was when it was checked: views of buffers, which cannot be
 * resized meanwhile; tuples, since a list may grow or shrink while its own items are asked for their buffers; and copies
 * of programs, which another thread could write to. */
typedef struct {
    Call call;
    PyObject *images, *jobs;
    Py_buffer *views;
    Py_ssize_t num_views, most_views;
    void **copies;
    Py_ssize_t num_copies;
    Worker *workers[MAX_THREADS];
    int num_workers;
} Request;

static void release(Request *request)
{
    for (int i = 0; i < request->num_workers; i++)
        give_worker_back(request->workers[i]);
    for (Py_ssize_t i = 0; i < request->num_views; i++)
        PyBuffer_Release(&request->views[i]);
    for (Py_ssize_t i = 0; i < request->num_copies; i++)
        free(request->copies[i]);
    Py_XDECREF(request->images);
    Py_XDECREF(request->jobs);
    free(request->copies);
    free(request->views);
    free(request->call.sources);
    free(request->call.jobs);
}

static int fail(PyObject *error, const char *message)
{
    PyErr_SetString(error, message);
    return -1;
}

static Py_buffer *view_of(Request *request, PyObject *object, int flags)
{
    if (request->num_views == request->most_views) {
        fail(PyExc_RuntimeError, "a call has more arrays than it was made for");
        return NULL;
    }
    Py_buffer *view = &request->views[request->num_views];
    if (PyObject_GetBuffer(object, view, flags) < 0)
        return NULL;
    request->num_views++;
    return view;
}

/* A copy of a view's bytes; NULL: there is no memory. */
static const void *copy_of(Request *request, const Py_buffer *view)
{
    Writer to = writer_of(malloc((size_t)view->len + 1), (size_t)view->len);
    if (!to.at) {
        fail(PyExc_MemoryError, "no memory for a call");
        return NULL;
    }
    const void *copy = request->copies[request->num_copies++] = to.at;
    put(&to, reader_of(view->buf, (size_t)view->len));
    return copy;
}

/* Bytes, or pixels. An empty one, or one of another shape, is no image. */
static int read_source(Request *request, PyObject *object, Source *source)
{
    *source = (Source){0};
    if (object == Py_None)
        return 0;
    const Py_buffer *view = view_of(request, object, PyBUF_ND);
    if (!view)
        return -1;
    if (view->itemsize != 1)
        return fail(PyExc_TypeError, "images must be of bytes");
    source->bytes = view->buf;
    source->size = (size_t)view->len;
    if (view->ndim == 3) {
        const int is_image = view->shape[0] >= 1 && view->shape[0] <= MAX_SIDE && view->shape[1] >= 1 &&
                             view->shape[1] <= MAX_SIDE && view->shape[2] == CHANNELS &&
                             (size_t)view->shape[0] * (size_t)view->shape[1] <= MAX_PIXELS;
        source->height = is_image ? (int)view->shape[0] : -1;
        source->width = is_image ? (int)view->shape[1] : -1;
    }
    return 0;
}

#define VIEWS_OF_JOB 3
#define COPIES_OF_JOB 2

/* Makes room for all images and jobs, of which `jobs` may be NULL, and reads the images. */
static int read_sources(Request *request, PyObject *images, PyObject *jobs)
{
    request->images = PySequence_Tuple(images);
    request->jobs = !request->images ? NULL : jobs ? PySequence_Tuple(jobs) : PyTuple_New(0);
    if (!request->jobs)
        return -1;
    const size_t num_images = (size_t)PyTuple_Size(request->images), num_jobs = (size_t)PyTuple_Size(request->jobs);
    request->call.num_images = (Py_ssize_t)num_images;
    request->most_views = (Py_ssize_t)(num_images + VIEWS_OF_JOB * num_jobs);
    request->call.sources = calloc(num_images + 1, sizeof(Source));
    request->call.jobs = calloc(num_jobs + 1, sizeof(Job));
    request->views = calloc((size_t)request->most_views + 1, sizeof(Py_buffer));
    request->copies = calloc(COPIES_OF_JOB * num_jobs + 1, sizeof(void *));
    if (!request->call.sources || !request->call.jobs || !request->views || !request->copies)
        return fail(PyExc_MemoryError, "no memory for a call");
    for (Py_ssize_t i = 0; i < request->call.num_images; i++)
        if (read_source(request, PyTuple_GetItem(request->images, i), &request->call.sources[i]) < 0)
            return -1;
    return 0;
}

/* Slots of images: uint8 (B, H, W, 3), writable. */
static int read_slots(Request *request, PyObject *object, const Py_buffer **slots)
{
    const Py_buffer *view = *slots = view_of(request, object, PyBUF_STRIDES | PyBUF_WRITABLE);
    if (!view)
        return -1;
    const Py_ssize_t *shape = view->shape, *strides = view->strides;
    if (view->ndim != 4 || view->itemsize != 1 || shape[0] != request->call.num_images || shape[3] != CHANNELS)
        return fail(PyExc_ValueError, "out must be uint8 (B, H, W, 3)");
    if (shape[1] < 1 || shape[2] < 1 || shape[1] > MAX_SIDE || shape[2] > MAX_SIDE)
        return fail(PyExc_ValueError, "out has images without pixels, or too large ones");
    const Py_ssize_t row = shape[2] * CHANNELS, distance = strides[0] < 0 ? -strides[0] : strides[0];
    if (strides[3] != 1 || strides[2] != CHANNELS || strides[1] != row || (shape[0] > 1 && distance < row * shape[1]))
        return fail(PyExc_ValueError, "out must be C-contiguous but for its first axis, and its images apart");
    return 0;
}

static int read_job(Request *request, PyObject *object, Job *job)
{
    PyObject *ops, *params, *out;
    if (!PyTuple_Check(object))
        return fail(PyExc_TypeError, "a job is a tuple (ops, params, out)");
    if (!PyArg_ParseTuple(object, "OOO;a job is (ops, params, out)", &ops, &params, &out))
        return -1;
    const Py_buffer *out_view, *ops_view = view_of(request, ops, PyBUF_ND);
    const Py_buffer *params_view = ops_view ? view_of(request, params, PyBUF_ND) : NULL;
    if (!params_view || read_slots(request, out, &out_view) < 0)
        return -1;
    if (ops_view->ndim != 2 || ops_view->itemsize != sizeof(int32_t) || ops_view->shape[1] != 2)
        return fail(PyExc_ValueError, "ops must be int32 (n, 2)");
    if (params_view->ndim != 2 || params_view->itemsize != sizeof(int64_t) ||
        params_view->shape[0] != request->call.num_images)
        return fail(PyExc_ValueError, "params must be int64 (B, P)");
    *job = (Job){.ops = copy_of(request, ops_view), .num_ops = ops_view->shape[0],
                 .params = copy_of(request, params_view), .num_params = params_view->shape[1], .out = out_view->buf, .slot_stride = out_view->strides[0],
                 .height = (int)out_view->shape[1], .width = (int)out_view->shape[2]};
    if (!job->ops || !job->params)
        return -1;
    return are_ops(job) ? 0 : fail(PyExc_ValueError, "ops name an unknown operation, or params that there are not");
}

static int read_jobs(Request *request)
{
    Py_ssize_t *num = &request->call.num_jobs;
    for (; *num < PyTuple_Size(request->jobs); ++*num)
        if (read_job(request, PyTuple_GetItem(request->jobs, *num), &request->call.jobs[*num]) < 0)
            return -1;
    return 0;
}

typedef struct {
    Call *call;
    Worker *worker;
    pthread_t id;
} Thread;

static void *work(void *argument)
{
    Thread *thread = argument;
    work_on(thread->call, thread->worker);
    return NULL;
}

/* One that cannot be started is done without: the others take its images. */
static void run_threads(Request *request)
{
    Thread threads[MAX_THREADS];
    int num_started = 1;
    for (int i = 1; i < request->num_workers; i++) {
        threads[num_started] = (Thread){.call = &request->call, .worker = request->workers[i]};
        if (pthread_create(&threads[num_started].id, NULL, work, &threads[num_started]) == 0)
            num_started++;
    }
    work_on(&request->call, request->workers[0]);
    for (int i = 1; i < num_started; i++)
        pthread_join(threads[i].id, NULL);
}

static PyObject *py_run(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *images, *jobs, *result = NULL;
    int num_threads, to_end;
    if (!PyArg_ParseTuple(args, "OOip", &images, &jobs, &num_threads, &to_end))
        return NULL;
    Request request = {.call = {.to_end = to_end, .simd = simd_level}};
    if (read_sources(&request, images, jobs) < 0 || read_jobs(&request) < 0)
        goto end;
    if (num_threads < 1 || num_threads > MAX_THREADS) {
        PyErr_Format(PyExc_ValueError, "threads must be 1 to %d, not %d", MAX_THREADS, num_threads);
        goto end;
    }
    if (num_threads > request.call.num_images)
        num_threads = request.call.num_images ? (int)request.call.num_images : 1;
    for (; request.num_workers < num_threads; request.num_workers++)
        if (!(request.workers[request.num_workers] = take_worker()))
            break;
    result = PyBytes_FromStringAndSize(NULL, request.call.num_images);
    if (!result || !request.num_workers) {
        Py_CLEAR(result);
        PyErr_NoMemory();
        goto end;
    }
    request.call.statuses = (uint8_t *)PyBytes_AsString(result);
    Py_BEGIN_ALLOW_THREADS
    run_threads(&request);
    Py_END_ALLOW_THREADS
end:
    release(&request);
    return result;
}

static PyObject *py_sizes(PyObject *self, PyObject *images)
{
    (void)self;
    PyObject *result = NULL;
    Request request = {0};
    if (read_sources(&request, images, NULL) == 0)
        result = PyBytes_FromStringAndSize(NULL, request.call.num_images * 3 * (Py_ssize_t)sizeof(int32_t));
    if (result) {
        int32_t *sizes = (int32_t *)PyBytes_AsString(result);
        for (Py_ssize_t i = 0; i < request.call.num_images; i++)
            describe(&request.call.sources[i], &sizes[3 * i]);
    }
    release(&request);
    return result;
}

static PyObject *py_decode_crop(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer data, out;
    unsigned int left, top, width, height, columns;
    int to_end;
    if (!PyArg_ParseTuple(args, "y*IIIIpw*I", &data, &left, &top, &width, &height, &to_end, &out, &columns))
        return NULL;
    PyObject *result = NULL;
    Worker *worker = take_worker();
    Header header;
    /* Sizes that cannot overflow: JPEG_MAX_DIMENSION is 65,500. */
    if (!worker) {
        PyErr_NoMemory();
    } else if (width < 1 || height < 1 || width > JPEG_MAX_DIMENSION || height > JPEG_MAX_DIMENSION ||
        left > JPEG_MAX_DIMENSION || top > JPEG_MAX_DIMENSION || columns > JPEG_MAX_DIMENSION) {
        PyErr_SetString(PyExc_ValueError, "no such crop");
    } else if ((unsigned long long)out.len != (unsigned long long)height * columns * 3) {
        PyErr_Format(PyExc_ValueError, "out has %zd bytes, not %u x %u x 3", out.len, height, columns);
    } else if (!read_header(data.buf, (size_t)data.len, &header)) {
        PyErr_SetString(PyExc_ValueError, "an unusual kind of JPEG, or over a limit");
    } else {
        const Crop crop = {left, top, width, height, to_end, columns};
        const int simd = simd_level; /* which another thread may set once the interpreter is let go of */
        int first;
        Py_BEGIN_ALLOW_THREADS
        first = decode_crop(&worker->decoder, &header, data.buf, (size_t)data.len, crop, NULL, simd, out.buf);
        Py_END_ALLOW_THREADS
        if (first < 0)
            PyErr_SetString(PyExc_ValueError, worker->decoder.trouble.message);
        else
            result = PyLong_FromLong(first);
    }
    if (worker)
        give_worker_back(worker);
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}

static PyObject *py_to_seekable(PyObject *self, PyObject *object)
{
    (void)self;
    Py_buffer data;
    Transcoder transcoder;
    if (PyObject_GetBuffer(object, &data, PyBUF_SIMPLE) < 0)
        return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = transcode(&transcoder, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyObject *result = NULL;
    if (failed)
        PyErr_SetString(PyExc_ValueError, transcoder.trouble.message);
    else
        result = PyBytes_FromStringAndSize((const char *)transcoder.result, (Py_ssize_t)transcoder.size);
    free(transcoder.result);
    PyBuffer_Release(&data);
    return result;
}

static PyObject *py_set_simd(PyObject *self, PyObject *level)
{
    (void)self;
    const long wanted = PyLong_AsLong(level);
    if (wanted == -1 && PyErr_Occurred())
        return NULL;
    simd_level = wanted < SIMD_NONE ? SIMD_NONE : wanted < most_simd ? (int)wanted : most_simd;
    return PyLong_FromLong(simd_level);
}

static PyMethodDef methods[] = {
    {"sizes", py_sizes, METH_O, "Heights and widths of JPEGs, by their headers; see kernel.c"},
    {"run", py_run, METH_VARARGS, "Make the images of a micro-batch; see kernel.c"},
    {"decode_crop", py_decode_crop, METH_VARARGS, "RGB of a rectangle of a JPEG; see kernel.c"},
    {"to_seekable", py_to_seekable, METH_O, "A JPEG as one that can be entered at any row of MCUs; see kernel.c"},
    {"set_simd", py_set_simd, METH_O, "Use no more than these vector instructions; see kernel.c"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_raypipe_kernel", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__raypipe_kernel(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && (PyModule_AddIntConstant(made, "INTERFACE_VERSION", INTERFACE_VERSION) < 0 ||
                 PyModule_AddIntConstant(made, "REPLACES_ENTROPY", REPLACES_ENTROPY) < 0 ||
                 PyModule_AddIntConstant(made, "LIBJPEG_TURBO_VERSION_NUMBER", LIBJPEG_TURBO_VERSION_NUMBER) < 0))
        Py_CLEAR(made);
    simd_level = most_simd = best_simd();
    make_crc_tables();
    return made;
}
