/* What the parts of the kernel share: an image, the memory that a thread makes images in, and statuses.
 *
 * An operation is `static int NAME(Image *image, const int64_t *params, Scratch *scratch)`. It returns DONE with the
 * result in *image, or another status. `params` are those behind `apply`, scratch->num_params of them can be read,
 * and all of them are untrusted: nothing is written outside of the memory that is handed out here, whatever they are.
 *
 *     pointwise             make_writable(image, scratch), then in place
 *     all others            new_image(&result, height, width, scratch), fill it, *image = result
 *     rows, tables          work_memory(scratch, bytes)
 *
 * Each may be called once by an operation. Rows hold width * 3 bytes; behind those may be another thread's slot, or
 * the end of a page, so nothing is read or written there.
 */
#ifndef RAYPIPE_IMAGE_H
#define RAYPIPE_IMAGE_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CHANNELS 3
#define MAX_SIDE 65500                       /* pixels, as in a JPEG */
/* As raypipe/kernel/ops.py has them, with their reasons. */
#define MAX_DECODE_BYTES ((size_t)5 << 28)
#define MAX_PIXELS (MAX_DECODE_BYTES / 6)

/* Of an image, in the bytes that run() returns. All but DONE leave the image to the caller. */
enum {
    DONE = 0,
    SKIPPED = 1,    /* there is no image */
    UNREADABLE = 2, /* not a JPEG that is taken here, or damaged */
    BAD_PARAMS = 3, /* no such operation, or not with these params */
    WRONG_SIZE = 4, /* the result has another size than its slot */
    NO_MEMORY = 5,
};

/* Of vector instructions: what the processor has, or less, as set_simd() of the module says. */
enum { SIMD_NONE = 0, SIMD_SSSE3 = 1, SIMD_AVX2 = 2 };

typedef struct {
    uint8_t *pixels; /* interleaved RGB */
    ptrdiff_t stride; /* bytes from a row to the next */
    int height, width;
    int writable; /* they are this thread's own, and nobody else needs them any more */
} Image;

/* Of pixels. */
typedef struct {
    int left, top, width, height;
} Rectangle;

typedef struct {
    uint8_t *bytes;
    size_t size;
} Buffer;

/* Of one thread. */
typedef struct {
    Buffer pixels[2]; /* results, in turns: an operation reads one and writes the other */
    int turn;         /* the one that is written next */
    Buffer work;
    Image slot;     /* where the result is wanted; without pixels until the last operation */
    int num_params; /* that can be read, of the operation at hand */
    int simd;
} Scratch;

/* At least `size` bytes, aligned to a cache line, with what was in them lost; NULL: there is no memory. */
static inline uint8_t *reserve(Buffer *buffer, size_t size)
{
    if (buffer->size < size) {
        free(buffer->bytes);
        buffer->size = 0;
        size = (size + size / 4 + 63) / 64 * 64;
        buffer->bytes = NULL;
        void *bytes;
        if (posix_memalign(&bytes, 64, size) != 0)
            return NULL;
        buffer->bytes = bytes;
        buffer->size = size;
    }
    return buffer->bytes;
}

static inline uint8_t *work_memory(Scratch *scratch, size_t size) { return reserve(&scratch->work, size); }

/* Memory for a result, in the slot if it belongs there. Not for the pixels of the image at hand. */
static inline int new_image(Image *result, int64_t height, int64_t width, Scratch *scratch)
{
    if (height < 1 || width < 1 || height > MAX_SIDE || width > MAX_SIDE ||
        (size_t)height * (size_t)width > MAX_PIXELS)
        return BAD_PARAMS;
    if (scratch->slot.pixels && scratch->slot.height == height && scratch->slot.width == width) {
        *result = scratch->slot;
        return DONE;
    }
    uint8_t *pixels = reserve(&scratch->pixels[scratch->turn], (size_t)height * (size_t)width * CHANNELS);
    if (!pixels)
        return NO_MEMORY;
    scratch->turn = !scratch->turn;
    *result = (Image){pixels, (ptrdiff_t)width * CHANNELS, (int)height, (int)width, 1};
    return DONE;
}

/* So many pixels of a row, both of which have them. */
static inline void copy_row(uint8_t *to, const uint8_t *from, int num)
{
    memcpy(to, from, (size_t)num * CHANNELS);
}

static inline void copy_pixels(const Image *from, const Image *to)
{
    for (int y = 0; y < from->height; y++)
        copy_row(to->pixels + y * to->stride, from->pixels + y * from->stride, from->width);
}

/* Copies an image that is not this thread's own. */
static inline int make_writable(Image *image, Scratch *scratch)
{
    Image copy;
    if (image->writable)
        return DONE;
    const int status = new_image(&copy, image->height, image->width, scratch);
    if (status == DONE) {
        copy_pixels(image, &copy);
        *image = copy;
    }
    return status;
}

static inline uint8_t clip(int value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value); }
#endif
