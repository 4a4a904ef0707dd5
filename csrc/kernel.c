/* The images of a micro-batch in one call, and records of LMDB: the optional extension behind raypipe/native.py.
 *
 *     sizes(images, refuse_oriented, min_side) -> int32 (B, 2)     height and width; 0, 0: refused
 *     run(images, sizes, jobs, threads, to_end) -> uint8 (B,)      statuses of image.h; 0: done
 *     decode_crop(data, left, top, width, height, eighths, to_end, out, columns) -> first     see jpeg_crop.h
 *     lmdb_open, lmdb_read                                         see lmdb.h
 *     set_simd(level) -> level                                     for tests: at most SIMD_AVX2, less than there is
 *
 * `images` are B objects: bytes of JPEGs, uint8 (H, W, 3) in C order, or None. Each job makes an image of each of them:
 * (ops, params, out) with ops int32 (n, 2), the code of an operation and where in a row of params its `apply` stands;
 * params int64 (B, P); out uint8 (B, H, W, 3), in C order but for its first axis. docs/transforms.md has the operations.
 *
 * With one job, a crop that comes first is all that is decoded; with several, the image is decoded once. What cannot
 * be done is refused for that image alone; its slots may then hold anything. Nothing is written outside of them. The
 * GIL is released; threads take one image after the other, and the result depends on an image's bytes and params alone.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>

#include "image.h"
#include "jpeg_crop.h"

#include "colour.h"
#include "filter.h"
#include "geometry.h"
#include "lmdb.h"

/* Of the interface above; raypipe/native.py asks for it. */
#define INTERFACE_VERSION 2

#define MAX_JOBS 256
#define MAX_OPS 64
#define MAX_THREADS 64
/* A JPEG of more has its scans counted, and what its decoding takes, in Python: image_header.py. */
#define MAX_PLAIN_PIXELS ((int64_t)(1 << 30) / 15)
#define MAX_SCANNED_PIXELS (16 * (int64_t)MAX_PIXELS)
#define SCAN_BYTES 10

enum { CROP = 1, CROP_SCALED, RESIZE, PAD, TURN, AFFINE, DROPOUT, JITTER, GREY, TABLE, BLUR, FILTER };

typedef int (*Operation)(Image *image, const int64_t *params, Scratch *scratch);

static const Operation OPERATIONS[] = {NULL, crop, NULL, resize, pad, turn, affine, dropout, jitter, grey, table, blur, filter};
#define NUM_CODES ((int)(sizeof OPERATIONS / sizeof *OPERATIONS))

static int simd_level;

typedef struct {
    const uint8_t *bytes; /* NULL: there is none */
    size_t size;
    int height, width;
    int is_pixels;
} Source;

typedef struct {
    const int32_t *ops; /* (num_ops, 2) */
    int num_ops;
    const int64_t *params; /* (B, num_params) */
    int num_params;
    uint8_t *out;
    Py_ssize_t image_bytes; /* from a slot to the next */
    int height, width;
} Job;

typedef struct {
    Trouble trouble; /* of the image at hand */
    Scratch scratch;
    Buffer whole; /* an image that several jobs use */
} Worker;

typedef struct {
    const Source *sources;
    const Job *jobs;
    int num_jobs, to_end;
    int num_images;
    int next; /* the one that is taken next, by any thread */
    uint8_t *statuses;
} Batch;

/* Decodes a rectangle into `buffer`. */
static int decode(Worker *worker, const Source *source, Crop crop, Buffer *buffer, Image *image)
{
    const int is_whole = crop.width == (JDIMENSION)source->width && crop.eighths == 8;
    crop.columns = crop.width + (is_whole ? 0 : EXTRA_COLUMNS);
    uint8_t *pixels = reserve(buffer, (size_t)crop.height * crop.columns * CHANNELS);
    if (!pixels)
        return NO_MEMORY;
    const int first = decode_crop(
        source->bytes, source->size, source->height, source->width, crop, pixels, &worker->trouble);
    if (first < 0)
        return UNREADABLE;
    *image = (Image){pixels + first * CHANNELS, (ptrdiff_t)crop.columns * CHANNELS, (int)crop.height, (int)crop.width, 1};
    return DONE;
}

/* Decodes what a job wants of a JPEG; *at is the first operation that is left. */
static int decode_for(Worker *worker, const Source *source, const Job *job, const int64_t *params, int to_end, int *at, Image *image)
{
    Crop crop = {0, 0, (JDIMENSION)source->width, (JDIMENSION)source->height, 8, to_end, 0};
    const int code = job->num_ops ? job->ops[0] : 0;
    const int num_params = code == CROP ? 4 : code == CROP_SCALED ? 5 : 0;
    if (num_params && params[job->ops[1]]) {
        const int64_t *box = params + job->ops[1] + 1;
        if (job->ops[1] + 1 + num_params > job->num_params)
            return BAD_PARAMS;
        for (int i = 0; i < 4; i++)
            if (box[i] < (i < 2 ? 0 : 1) || box[i] > MAX_SIDE)
                return BAD_PARAMS;
        if (code == CROP_SCALED && box[4] != 1 && box[4] != 2 && box[4] != 4 && box[4] != 8)
            return BAD_PARAMS;
        crop = (Crop){(JDIMENSION)box[1], (JDIMENSION)box[0], (JDIMENSION)box[3], (JDIMENSION)box[2],
                      code == CROP ? 8 : (unsigned int)box[4], to_end, 0};
        if (crop.height > MAX_PIXELS / (crop.width + EXTRA_COLUMNS))
            return BAD_PARAMS;
        *at = 1;
    }
    Scratch *scratch = &worker->scratch;
    const int status = decode(worker, source, crop, &scratch->pixels[scratch->turn], image);
    scratch->turn = !scratch->turn;
    return status;
}

/* Does a job for one image. */
static int run_job(Worker *worker, const Source *source, const Image *whole, const Job *job, int number, int to_end)
{
    Scratch *scratch = &worker->scratch;
    const int64_t *params = job->params + (size_t)number * (size_t)job->num_params;
    const Image slot = {job->out + number * job->image_bytes, (ptrdiff_t)job->width * CHANNELS, job->height, job->width, 1};
    Image image;
    int at = 0, status = DONE;
    if (whole)
        image = *whole;
    else
        status = decode_for(worker, source, job, params, to_end, &at, &image);
    int last = job->num_ops - 1;
    while (last >= at && !params[job->ops[2 * last + 1]])
        last--;
    for (; at <= last && status == DONE; at++) {
        const int code = job->ops[2 * at], offset = job->ops[2 * at + 1];
        if (!params[offset])
            continue;
        if (code < 1 || code >= NUM_CODES || !OPERATIONS[code])
            return BAD_PARAMS;
        scratch->num_params = job->num_params - offset - 1;
        scratch->slot = at == last ? slot : (Image){NULL, 0, 0, 0, 0};
        status = OPERATIONS[code](&image, params + offset + 1, scratch);
    }
    if (status != DONE)
        return status;
    if (image.height != slot.height || image.width != slot.width)
        return WRONG_SIZE;
    if (image.pixels != slot.pixels)
        copy_pixels(&image, &slot);
    return DONE;
}

static int run_image(Worker *worker, const Batch *batch, int number)
{
    const Source *source = &batch->sources[number];
    Image whole;
    int has_whole = 0;
    if (!source->bytes)
        return SKIPPED;
    if (source->is_pixels) {
        whole = (Image){(uint8_t *)source->bytes, (ptrdiff_t)source->width * CHANNELS, source->height, source->width, 0};
        has_whole = 1;
    } else if (source->height < 1) {
        return UNREADABLE;
    } else if (batch->num_jobs > 1) {
        const Crop crop = {0, 0, (JDIMENSION)source->width, (JDIMENSION)source->height, 8, batch->to_end, 0};
        const int status = decode(worker, source, crop, &worker->whole, &whole);
        if (status != DONE)
            return status;
        whole.writable = 0;
        has_whole = 1;
    }
    for (int j = 0; j < batch->num_jobs; j++) {
        const int status = run_job(worker, source, has_whole ? &whole : NULL, &batch->jobs[j], number, batch->to_end);
        if (status != DONE)
            return status;
    }
    return DONE;
}

static void *work(void *argument)
{
    Batch *batch = argument;
    Worker *worker = calloc(1, sizeof *worker);
    if (!worker)
        return NULL; /* the images are for the others */
    worker->scratch.simd = simd_level;
    for (;;) {
        const int number = __atomic_fetch_add(&batch->next, 1, __ATOMIC_RELAXED);
        if (number >= batch->num_images)
            break;
        batch->statuses[number] = (uint8_t)run_image(worker, batch, number);
    }
    for (int i = 0; i < 2; i++)
        free(worker->scratch.pixels[i].bytes);
    free(worker->scratch.work.bytes);
    free(worker->whole.bytes);
    free(worker);
    return NULL;
}

static void run_batch(Batch *batch, int threads)
{
    pthread_t others[MAX_THREADS];
    int num = 0;
    if (threads > batch->num_images)
        threads = batch->num_images;
    while (num < threads - 1 && num < MAX_THREADS && pthread_create(&others[num], NULL, work, batch) == 0)
        num++;
    work(batch);
    for (int i = 0; i < num; i++)
        pthread_join(others[i], NULL);
}

/* The arguments of run(), and what of them is to be given back. */
typedef struct {
    Py_buffer *buffers;
    int num_buffers;
    Source *sources;
    Job *jobs;
    int num_images, num_jobs;
} Call;

static Py_buffer *view(Call *call, PyObject *object, int flags)
{
    Py_buffer *buffer = &call->buffers[call->num_buffers];
    if (PyObject_GetBuffer(object, buffer, flags) < 0)
        return NULL;
    call->num_buffers++;
    return buffer;
}

static int read_sources(Call *call, PyObject *images, const int32_t *sizes)
{
    for (int i = 0; i < call->num_images; i++) {
        PyObject *object = PySequence_GetItem(images, i); /* borrowed from `images` once it is given back */
        if (!object)
            return 0;
        const int is_none = object == Py_None;
        Py_buffer *buffer = is_none ? NULL : view(call, object, PyBUF_ND);
        Py_DECREF(object);
        if (is_none)
            continue;
        if (!buffer)
            return 0;
        Source *source = &call->sources[i];
        *source = (Source){buffer->buf, (size_t)buffer->len, sizes[2 * i], sizes[2 * i + 1], buffer->ndim == 3};
        if (source->height < 0 || source->width < 0 || source->height > MAX_SIDE || source->width > MAX_SIDE ||
            (source->is_pixels &&
             (buffer->itemsize != 1 || buffer->shape[0] != source->height || buffer->shape[1] != source->width ||
              buffer->shape[2] != CHANNELS || source->height < 1 || source->width < 1))) {
            PyErr_Format(PyExc_ValueError, "image %d is not uint8 (H, W, 3) of the size that is said", i);
            return 0;
        }
    }
    return 1;
}

static int read_job(Call *call, PyObject *item, Job *job)
{
    PyObject *ops, *params, *out;
    if (!PyArg_ParseTuple(item, "OOO", &ops, &params, &out))
        return 0;
    const Py_buffer *codes = view(call, ops, PyBUF_ND), *numbers = codes ? view(call, params, PyBUF_ND) : NULL;
    const Py_buffer *slots = numbers ? view(call, out, PyBUF_STRIDES | PyBUF_WRITABLE) : NULL;
    if (!slots)
        return 0;
    const Py_ssize_t num = call->num_images;
    if (codes->ndim != 2 || codes->itemsize != 4 || codes->shape[1] != 2 || codes->shape[0] > MAX_OPS ||
        numbers->ndim != 2 || numbers->itemsize != 8 || numbers->shape[0] != num || numbers->shape[1] > 1 << 20 ||
        slots->ndim != 4 || slots->itemsize != 1 || slots->shape[0] != num || slots->shape[3] != CHANNELS ||
        slots->shape[1] < 1 || slots->shape[2] < 1 || slots->shape[1] > MAX_SIDE || slots->shape[2] > MAX_SIDE ||
        slots->strides[3] != 1 || slots->strides[2] != CHANNELS ||
        slots->strides[1] != slots->shape[2] * CHANNELS) {
        PyErr_SetString(PyExc_ValueError, "a job is ops int32 (n, 2), params int64 (B, P), out uint8 (B, H, W, 3)");
        return 0;
    }
    *job = (Job){codes->buf, (int)codes->shape[0], numbers->buf, (int)numbers->shape[1],
                 slots->buf, slots->strides[0], (int)slots->shape[1], (int)slots->shape[2]};
    for (int i = 0; i < job->num_ops; i++)
        if (job->ops[2 * i + 1] < 0 || job->ops[2 * i + 1] >= job->num_params) {
            PyErr_SetString(PyExc_ValueError, "an operation's params are outside of a row");
            return 0;
        }
    return 1;
}

static PyObject *py_run(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *images, *jobs, *result = NULL;
    Py_buffer sizes;
    int threads, to_end;
    if (!PyArg_ParseTuple(args, "Oy*Oip", &images, &sizes, &jobs, &threads, &to_end))
        return NULL;
    const Py_ssize_t num_images = PySequence_Size(images), num_jobs = PySequence_Size(jobs);
    Call call = {NULL, 0, NULL, NULL, (int)num_images, (int)num_jobs};
    if (num_images < 0 || num_jobs < 0 || num_images > INT32_MAX / 16 || num_jobs > MAX_JOBS ||
        sizes.len != num_images * 8) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "sizes are int32 (B, 2), and jobs a list");
        goto end;
    }
    call.buffers = calloc((size_t)(num_images + 3 * num_jobs + 1), sizeof *call.buffers);
    call.sources = calloc((size_t)num_images + 1, sizeof *call.sources);
    call.jobs = calloc((size_t)num_jobs + 1, sizeof *call.jobs);
    if (!call.buffers || !call.sources || !call.jobs) {
        PyErr_NoMemory();
        goto end;
    }
    if (!read_sources(&call, images, sizes.buf))
        goto end;
    for (int i = 0; i < call.num_jobs; i++) {
        PyObject *item = PySequence_GetItem(jobs, i);
        const int is_read = item && read_job(&call, item, &call.jobs[i]);
        Py_XDECREF(item);
        if (!is_read)
            goto end;
    }
    result = PyBytes_FromStringAndSize(NULL, num_images);
    if (!result)
        goto end;
    Batch batch = {call.sources, call.jobs, call.num_jobs, to_end, call.num_images, 0, (uint8_t *)PyBytes_AsString(result)};
    memset(batch.statuses, NO_MEMORY, (size_t)num_images);
    Py_BEGIN_ALLOW_THREADS
    run_batch(&batch, threads);
    Py_END_ALLOW_THREADS
end:
    for (int i = 0; i < call.num_buffers; i++)
        PyBuffer_Release(&call.buffers[i]);
    free(call.buffers);
    free(call.sources);
    free(call.jobs);
    PyBuffer_Release(&sizes);
    return result;
}

static int has_orientation(const uint8_t *data, size_t size)
{
    static const char mark[6] = {'E', 'x', 'i', 'f', 0, 0};
    const uint8_t *at = data, *end = data + size;
    while ((at = memchr(at, mark[0], (size_t)(end - at))) != NULL) {
        if (end - at >= (ptrdiff_t)sizeof mark && memcmp(at, mark, sizeof mark) == 0)
            return 1;
        at++;
    }
    return 0;
}

static PyObject *py_sizes(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *images;
    int refuse_oriented, min_side;
    if (!PyArg_ParseTuple(args, "Opi", &images, &refuse_oriented, &min_side))
        return NULL;
    const Py_ssize_t num = PySequence_Size(images);
    PyObject *result = num < 0 ? NULL : PyBytes_FromStringAndSize(NULL, num * 8);
    if (!result)
        return NULL;
    int32_t *sizes = (int32_t *)PyBytes_AsString(result);
    memset(sizes, 0, (size_t)num * 8);
    for (Py_ssize_t i = 0; i < num; i++) {
        PyObject *object = PySequence_GetItem(images, i);
        Py_buffer buffer;
        if (!object || object == Py_None || PyObject_GetBuffer(object, &buffer, PyBUF_SIMPLE) < 0) {
            const int is_none = object == Py_None;
            Py_XDECREF(object);
            if (is_none)
                continue;
            Py_DECREF(result);
            return NULL;
        }
        Frame frame;
        if (read_frame(buffer.buf, (size_t)buffer.len, &frame)) {
            const int64_t pixels = (int64_t)frame.height * frame.width;
            const int short_side = frame.height < frame.width ? frame.height : frame.width;
            const int has_few_scans = frame.has_one_scan || buffer.len / SCAN_BYTES <= MAX_SCANNED_PIXELS / pixels;
            if (pixels <= MAX_PLAIN_PIXELS && has_few_scans && frame.height <= MAX_SIDE && frame.width <= MAX_SIDE &&
                !(min_side > 0 && short_side >= 2 * (int64_t)min_side) &&
                !(refuse_oriented && has_orientation(buffer.buf, (size_t)buffer.len))) {
                sizes[2 * i] = frame.height;
                sizes[2 * i + 1] = frame.width;
            }
        }
        PyBuffer_Release(&buffer);
        Py_DECREF(object);
    }
    return result;
}

static PyObject *py_decode_crop(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer data, out;
    unsigned int left, top, width, height, eighths, columns;
    int to_end;
    if (!PyArg_ParseTuple(args, "y*IIIIIpw*I", &data, &left, &top, &width, &height, &eighths, &to_end, &out, &columns))
        return NULL;
    PyObject *result = NULL;
    /* Sizes that cannot overflow: JPEG_MAX_DIMENSION is 65,500. */
    if (width < 1 || height < 1 || width > JPEG_MAX_DIMENSION || height > JPEG_MAX_DIMENSION ||
        left > JPEG_MAX_DIMENSION || top > JPEG_MAX_DIMENSION || columns > JPEG_MAX_DIMENSION || eighths < 1 ||
        eighths > 8) {
        PyErr_SetString(PyExc_ValueError, "no such crop or scale");
    } else if ((unsigned long long)out.len != (unsigned long long)height * columns * 3) {
        PyErr_Format(PyExc_ValueError, "out has %zd bytes, not %u x %u x 3", out.len, height, columns);
    } else {
        const Crop crop = {left, top, width, height, eighths, to_end, columns};
        Trouble trouble;
        int first;
        Py_BEGIN_ALLOW_THREADS
        first = decode_crop(data.buf, (size_t)data.len, 0, 0, crop, out.buf, &trouble);
        Py_END_ALLOW_THREADS
        if (first < 0)
            PyErr_SetString(PyExc_ValueError, trouble.message);
        else
            result = PyLong_FromLong(first);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}

static int best_simd(void)
{
#ifdef HAS_X86_SIMD
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        return SIMD_AVX2;
    if (__builtin_cpu_supports("ssse3"))
        return SIMD_SSSE3;
#endif
    return SIMD_NONE;
}

static PyObject *py_set_simd(PyObject *self, PyObject *args)
{
    (void)self;
    int level;
    if (!PyArg_ParseTuple(args, "i", &level))
        return NULL;
    const int best = best_simd();
    simd_level = level < 0 ? SIMD_NONE : level < best ? level : best;
    return PyLong_FromLong(simd_level);
}

static PyMethodDef methods[] = {
    {"sizes", py_sizes, METH_VARARGS, "Heights and widths of JPEGs; see kernel.c"},
    {"run", py_run, METH_VARARGS, "Make the images of a micro-batch; see kernel.c"},
    {"decode_crop", py_decode_crop, METH_VARARGS, "RGB of a rectangle of a JPEG at a scale of eighths/8; see jpeg_crop.h"},
    {"lmdb_open", py_lmdb_open, METH_VARARGS, "A reader of an open file; see lmdb.h"},
    {"lmdb_read", py_lmdb_read, METH_VARARGS, "Columns of many records; see lmdb.h"},
    {"set_simd", py_set_simd, METH_VARARGS, "Use less than the processor has; see kernel.c"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_raypipe_kernel", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__raypipe_kernel(void)
{
    simd_level = best_simd();
    PyObject *made = PyModule_Create(&module);
    if (made && (PyModule_AddIntConstant(made, "INTERFACE_VERSION", INTERFACE_VERSION) < 0 ||
                 PyModule_AddIntConstant(made, "LIBJPEG_TURBO_VERSION_NUMBER", LIBJPEG_TURBO_VERSION_NUMBER) < 0))
        Py_CLEAR(made);
    return made;
}
