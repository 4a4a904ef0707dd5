/* The header of a JPEG, read once: its size, whether it is taken here, and where its tables are.
 *
 * Nothing else in csrc/ looks for segments. A header is plain, or it is not taken: each segment begins where the one
 * before ends, with one FF (no fill bytes), and is of a kind that decoders know; there is one frame, of Huffman codes
 * and 8 bits. Of such a header libjpeg can have no other opinion, and jpeg_crop.h still compares what libjpeg says with
 * this. All else is left to raypipe/transform/decode/jpeg_header.py, which has the rules for any JPEG and the last word.
 */
#ifndef RAYPIPE_JPEG_HEADER_H
#define RAYPIPE_JPEG_HEADER_H

#include "bounds.h"
#include "image.h"

#define MAX_JPEG_SIDE 65500
/* From limits.py and jpeg_header.py, where they stand with their reasons. A file below both needs no look at its scans. */
#define MOST_BYTES_PER_PIXEL 15
#define MAX_SCANNED_PIXELS ((size_t)16 * 178956970)
#define SCAN_BYTES 10

/* Of those that a decoder of one scan reads; encoders write fewer than ten. */
#define MAX_SEGMENTS 32

typedef struct {
    int marker;
    Reader body;
} Segment;

typedef struct {
    int height, width, num_components, is_progressive;
    int has_metadata; /* EXIF or XMP, maybe, which may say that the image is turned */
    Reader codes; /* behind the header: from the first scan's codes to the end of the file */
    int num_segments;
    Segment segments[MAX_SEGMENTS]; /* tables, frame, restarts, JFIF and Adobe; the last is the scan's */
} Header;

/* Baseline, extended and progressive frames of 8 bits in the usual samplings: see is_usual in jpeg_crop.h. */
static int read_frame(Reader body, int marker, Header *header)
{
    uint64_t precision, height, width, num;
    if (!take_big(&body, 1, &precision) || !take_big(&body, 2, &height) || !take_big(&body, 2, &width) ||
        !take_big(&body, 1, &num) || precision != 8 || (num != 1 && num != 3) || body.left != 3 * num || height < 1 ||
        width < 1 || height > MAX_JPEG_SIDE || width > MAX_JPEG_SIDE)
        return 0;
    header->height = (int)height;
    header->width = (int)width;
    header->num_components = (int)num;
    header->is_progressive = marker == 0xC2;
    const int luma = byte_at(&body, 1);
    if (num == 1)
        return luma == 0x11;
    return (luma == 0x11 || luma == 0x21 || luma == 0x41 || luma == 0x12 || luma == 0x22) &&
           byte_at(&body, 4) == 0x11 && byte_at(&body, 7) == 0x11;
}

static int is_within_limits(const Header *header, size_t size, int components_in_scan)
{
    const size_t num_pixels = (size_t)header->height * (size_t)header->width;
    const int has_one_scan = !header->is_progressive && components_in_scan == header->num_components;
    if (has_one_scan) /* libjpeg refuses a second one, and holds a few rows beside the pixels */
        return num_pixels <= MAX_PIXELS;
    return num_pixels * MOST_BYTES_PER_PIXEL <= MAX_DECODE_BYTES && size / SCAN_BYTES <= MAX_SCANNED_PIXELS / num_pixels;
}

/* 0: not taken. */
static int read_header(const uint8_t *data, size_t size, Header *header)
{
    Reader rest = reader_of(data, size), body;
    uint64_t start, mark, length;
    int has_frame = 0;
    header->has_metadata = header->num_segments = 0;
    if (!take_big(&rest, 2, &start) || start != 0xFFD8)
        return 0;
    while (take_big(&rest, 2, &mark) && mark >> 8 == 0xFF && take_big(&rest, 2, &length) && length >= 2 &&
           take(&rest, length - 2, &body)) {
        const int marker = (int)mark & 255;
        switch (marker) {
        case 0xC0: /* frames */
        case 0xC1:
        case 0xC2:
            if (has_frame || !read_frame(body, marker, header))
                return 0;
            has_frame = 1;
            break;
        case 0xC4: /* tables, and the interval of restarts */
        case 0xDB:
        case 0xDD:
        case 0xDA: /* start of scan */
        case 0xE0: /* JFIF */
        case 0xEE: /* Adobe */
            break;
        case 0xE1:
            header->has_metadata = 1;
            continue;
        default: /* application data and comments; no marker of any other kind */
            if ((marker & 0xF0) != 0xE0 && marker != 0xFE)
                return 0;
            continue;
        }
        if (header->num_segments == MAX_SEGMENTS)
            return 0;
        header->segments[header->num_segments++] = (Segment){marker, body};
        if (marker == 0xDA) {
            header->codes = rest;
            return has_frame && is_within_limits(header, size, byte_at(&body, 0));
        }
    }
    return 0;
}
#endif
