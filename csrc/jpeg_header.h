/* A JPEG's size, and whether run() takes it, from its header: limits are those of raypipe/transform/image_header.py.
 *
 * Segments are walked without libjpeg, for a microsecond's worth of time. Whatever is unusual or odd is not taken.
 */
#ifndef RAYPIPE_JPEG_HEADER_H
#define RAYPIPE_JPEG_HEADER_H

#include "image.h"

#define MAX_JPEG_SIDE 65500
/* From image_header.py, where they stand with their reasons. A file below both needs no look at its scans. */
#define MAX_DECODE_BYTES ((size_t)1 << 30)
#define MOST_BYTES_PER_PIXEL 15
#define MAX_SCANNED_PIXELS (16 * MAX_PIXELS)
#define SCAN_BYTES 10

typedef struct {
    int height, width, num_components, is_progressive, has_exif;
} Header;

#define EXIF "Exif\0" /* and one more zero, its end */

/* Baseline, extended and progressive frames of 8 bits in the usual samplings: see is_usual in jpeg_crop.h. */
static int read_frame(const uint8_t *body, size_t size, int marker, Header *header)
{
    if (size < 6 || body[0] != 8)
        return 0;
    header->height = body[1] << 8 | body[2];
    header->width = body[3] << 8 | body[4];
    header->num_components = body[5];
    header->is_progressive = marker == 0xC2;
    const int num = header->num_components;
    if ((num != 1 && num != 3) || size != 6 + 3 * (size_t)num || header->height < 1 || header->width < 1 ||
        header->height > MAX_JPEG_SIDE || header->width > MAX_JPEG_SIDE)
        return 0;
    if (num == 1)
        return body[7] == 0x11;
    const int luma = body[7];
    return (luma == 0x11 || luma == 0x21 || luma == 0x41 || luma == 0x12 || luma == 0x22) && body[10] == 0x11 &&
           body[13] == 0x11;
}

static int is_within_limits(const Header *header, size_t size, int components_in_scan)
{
    const size_t num_pixels = (size_t)header->height * (size_t)header->width;
    if (num_pixels * MOST_BYTES_PER_PIXEL > MAX_DECODE_BYTES)
        return 0;
    const int has_one_scan = !header->is_progressive && components_in_scan == header->num_components;
    return has_one_scan || size / SCAN_BYTES <= MAX_SCANNED_PIXELS / num_pixels;
}

/* 0: not taken. */
static int read_header(const uint8_t *data, size_t size, Header *header)
{
    int has_frame = 0;
    header->has_exif = 0;
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8)
        return 0;
    for (size_t at = 2; size - at >= 4;) {
        const int marker = data[at + 1];
        const size_t length = (size_t)data[at + 2] << 8 | data[at + 3];
        const uint8_t *body = data + at + 4;
        if (data[at] != 0xFF || length < 2 || length > size - at - 2)
            return 0;
        if (marker == 0xDA) /* start of scan */
            return has_frame && length > 2 && is_within_limits(header, size, body[0]);
        if (marker == 0xC0 || marker == 0xC1 || marker == 0xC2) {
            if (has_frame || !read_frame(body, length - 2, marker, header))
                return 0;
            has_frame = 1;
        } else if (marker == 0xE1 && length >= 2 + sizeof EXIF && memcmp(body, EXIF, sizeof EXIF) == 0) {
            header->has_exif = 1;
        } else if (marker != 0xC4 && marker < 0xDB) { /* all but tables, application data and comments */
            return 0;
        }
        at += 2 + length;
        if (at > size)
            return 0;
    }
    return 0;
}
#endif
