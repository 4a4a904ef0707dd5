/* A program of operations, run on an image after the other by a worker. kernel.c has the call and its threads. */
#ifndef RAYPIPE_PROGRAM_H
#define RAYPIPE_PROGRAM_H

#include <stdatomic.h>

#include "image.h"
#include "jpeg_crop.h"
#include "jpeg_header.h"

#include "color.h"
#include "filter.h"
#include "geometry.h"
#include "resize.h"

/* A worker keeps buffers up to this size from a call to the next, bytes: an image of 512 x 512 has 0.8 million. */
#define KEPT_BYTES ((size_t)4 << 20)

typedef int Operation(Image *image, const int64_t *params, Scratch *scratch);

enum { CROP = 1, RESIZE = 2, NUM_CODES = 12 };

/* By code: how many params it reads in any case, and whether it works in place. */
static const struct {
    Operation *operation;
    int num_params, is_pointwise;
} OPERATIONS[NUM_CODES] = {
    [CROP] = {crop, 4, 0},
    [RESIZE] = {resize, 3, 0},
    [3] = {pad, 8, 0},
    [4] = {turn, 1, 0},
    [5] = {affine, 11, 0},
    [6] = {dropout, 4, 1},
    [7] = {jitter, 8, 1},
    [8] = {gray, 0, 1},
    [9] = {table, 4, 1},
    [10] = {blur, 2 + MAX_RADIUS + 1, 0},
    [11] = {filter, 2 + MAX_FILTER * MAX_FILTER, 0},
};

typedef struct {
    const uint8_t *bytes; /* NULL: no image */
    size_t size;
    int height, width; /* of pixels; 0: encoded; -1: of no use */
} Source;

typedef struct {
    const int32_t (*ops)[2];
    Py_ssize_t num_ops;
    const int64_t *params;
    Py_ssize_t num_params; /* of an image */
    uint8_t *out;
    Py_ssize_t slot_stride;
    int height, width;
} Job;

typedef struct {
    Source *sources;
    Py_ssize_t num_images;
    Job *jobs;
    Py_ssize_t num_jobs;
    int to_end, simd;
    uint8_t *statuses;
    atomic_long next;
} Call;

/* What a thread works with, from a call to the next. */
typedef struct Worker {
    struct Worker *next;
    Decoder decoder;
    Buffer decoded, rows;
    Scratch scratch;
} Worker;

static void trim(Buffer *buffer)
{
    if (buffer->size > KEPT_BYTES) {
        free(buffer->bytes);
        *buffer = (Buffer){0};
    }
}

static void trim_worker(Worker *worker)
{
    trim(&worker->decoded);
    trim(&worker->scratch.pixels[0]);
    trim(&worker->scratch.pixels[1]);
    trim(&worker->scratch.work);
#ifdef HAS_AVX2
    trim(&worker->decoder.baseline.clean);
    trim(&worker->decoder.baseline.planes);
    trim(&worker->decoder.baseline.rows);
#endif
}

static int best_simd(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") ? SIMD_AVX2 : __builtin_cpu_supports("ssse3") ? SIMD_SSSE3 : SIMD_NONE;
#else
    return SIMD_NONE;
#endif
}

/* Whether all codes are known, and their params within a row. */
static int are_ops(const Job *job)
{
    for (Py_ssize_t i = 0; i < job->num_ops; i++) {
        const int32_t code = job->ops[i][0], at = job->ops[i][1];
        if (code < 1 || code >= NUM_CODES || at < 0 || job->num_params - at - 1 < OPERATIONS[code].num_params)
            return 0;
    }
    return 1;
}

static void describe(const Source *source, int32_t description[3])
{
    Header header;
    description[0] = description[1] = description[2] = 0;
    if (source->bytes && source->height == 0 && read_header(source->bytes, source->size, &header)) {
        description[0] = header.height;
        description[1] = header.width;
        description[2] = header.has_metadata;
    }
}

/* The rows of an image that the job's operations from number `first` on read; NULL: all, or there are several jobs. */
static const uint8_t *rows_read(const Call *call, Py_ssize_t number, Py_ssize_t first, int height, Buffer *rows)
{
    const Job *job = call->jobs;
    if (call->num_jobs > 1)
        return NULL;
    const int64_t *row = job->params + number * job->num_params;
    while (first < job->num_ops && !row[job->ops[first][1]])
        first++;
    if (first == job->num_ops || job->ops[first][0] != RESIZE)
        return NULL;
    uint8_t *marks = reserve(rows, (size_t)height);
    return marks && mark_rows(row + job->ops[first][1] + 1, height, marks) ? marks : NULL;
}

/* A box of a JPEG, NULL: all of it; for the operations from number `first` on. */
static int decode(
    Worker *worker, const Source *source, const int64_t *box, const Call *call, Py_ssize_t number, Py_ssize_t first,
    Image *image)
{
    Header header;
    if (source->height < 0 || !read_header(source->bytes, source->size, &header))
        return UNREADABLE;
    const int64_t whole[4] = {0, 0, header.height, header.width};
    if (!box)
        box = whole;
    if (!is_box(box, header.height, header.width))
        return BAD_PARAMS;
    const Crop crop = {(JDIMENSION)box[1], (JDIMENSION)box[0], (JDIMENSION)box[3], (JDIMENSION)box[2],
                       call->to_end, (JDIMENSION)(box == whole ? box[3] : box[3] + EXTRA_COLUMNS)};
    const ptrdiff_t stride = (ptrdiff_t)crop.columns * CHANNELS;
    uint8_t *pixels = reserve(&worker->decoded, (size_t)crop.height * (size_t)stride);
    if (!pixels)
        return NO_MEMORY;
    const uint8_t *rows = rows_read(call, number, first, (int)crop.height, &worker->rows);
    const int column =
        decode_crop(&worker->decoder, &header, source->bytes, source->size, crop, rows, worker->scratch.simd, pixels);
    if (column < 0)
        return UNREADABLE;
    *image = (Image){pixels + column * CHANNELS, stride, (int)crop.height, (int)crop.width, 1};
    return DONE;
}

/* Runs the operations from number `first` on, and puts the result into its slot.
 *
 * The slot is offered to the last operation that makes an image anew: those behind it work in place. */
static int run_program(const Job *job, Py_ssize_t number, Py_ssize_t first, Image image, Scratch *scratch)
{
    const int64_t *row = job->params + number * job->num_params;
    const Image slot = {job->out + number * job->slot_stride, (ptrdiff_t)job->width * CHANNELS, job->height,
                        job->width, 1};
    Py_ssize_t last = job->num_ops;
    while (last > first && (!row[job->ops[last - 1][1]] || OPERATIONS[job->ops[last - 1][0]].is_pointwise))
        last--;
    scratch->slot = (Image){0};
    for (Py_ssize_t i = first; i < job->num_ops; i++) {
        const int code = job->ops[i][0], at = job->ops[i][1];
        if (i >= last - 1)
            scratch->slot = slot;
        if (!row[at])
            continue;
        const Py_ssize_t num_params = job->num_params - at - 1;
        scratch->num_params = num_params < INT32_MAX ? (int)num_params : INT32_MAX;
        const int status = OPERATIONS[code].operation(&image, row + at + 1, scratch);
        if (status != DONE)
            return status;
    }
    if (image.height != slot.height || image.width != slot.width)
        return WRONG_SIZE;
    if (image.pixels != slot.pixels)
        copy_pixels(&image, &slot);
    return DONE;
}

/* With one job, a crop that comes first is decoded alone. */
static int make_image(const Call *call, Py_ssize_t number, Worker *worker)
{
    const Source *source = &call->sources[number];
    const Job *job = call->jobs;
    Image image;
    Py_ssize_t first = 0;
    if (!source->bytes)
        return SKIPPED;
    if (call->num_jobs == 0)
        return DONE;
    worker->scratch.simd = call->simd;
    if (source->height > 0) {
        image = (Image){(uint8_t *)source->bytes, (ptrdiff_t)source->width * CHANNELS, source->height,
                        source->width, 0};
    } else {
        const int64_t *params = NULL;
        if (call->num_jobs == 1 && job->num_ops && job->ops[0][0] == CROP &&
            job->params[number * job->num_params + job->ops[0][1]]) {
            first = 1;
            params = job->params + number * job->num_params + job->ops[0][1] + 1;
        }
        const int status = decode(worker, source, params, call, number, first, &image);
        if (status != DONE)
            return status;
        image.writable = call->num_jobs == 1;
    }
    for (Py_ssize_t i = 0; i < call->num_jobs; i++) {
        const int status = run_program(&job[i], number, first, image, &worker->scratch);
        if (status != DONE)
            return status;
    }
    return DONE;
}

static void work_on(Call *call, Worker *worker)
{
    for (;;) {
        const Py_ssize_t number = atomic_fetch_add(&call->next, 1);
        if (number >= call->num_images)
            return;
        call->statuses[number] = (uint8_t)make_image(call, number, worker);
    }
}
#endif
