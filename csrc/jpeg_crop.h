/* A rectangle of a JPEG, decoded without the rest.
 *
 * Columns outside the rectangle are entropy-decoded only, and so are rows above and below it: the inverse DCT,
 * upsampling and colour conversion are left out there, and jpeg_huffman.h reads the codes. With `to_end` the file is
 * still read to its end, so that damage anywhere is found, as a full decode finds it; without, a file of one scan is
 * read to the end of the blocks that the rectangle's last row is in. Pixels are those of a full decode, to the bit:
 * libjpeg treats the edge of what it decodes as the edge of the image when it upsamples chroma, so MARGIN more columns
 * are decoded on each side.
 *
 * Whatever is unusual (a colour space, a sampling, an unfinished progressive file) or wrong (any warning) is refused;
 * the caller then decodes the whole image by its usual way, which has the last word.
 *
 * Bytes are untrusted: libjpeg's errors come back through longjmp, its messages are never printed, and no size is
 * used before it has been compared with what libjpeg says of the image.
 */
#ifndef RAYPIPE_JPEG_CROP_H
#define RAYPIPE_JPEG_CROP_H

#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>
#include <jerror.h>

/* Older ones have faults in jpeg_skip_scanlines that untrusted bytes reach. */
#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "needs the headers of libjpeg-turbo 2.1 or later"
#endif

#include "jpeg_huffman.h"

/* Output columns. Chroma's interpolation reaches 1 chroma sample to each side, which is 2 pixels; and rows of fewer
 * than 3 chroma samples, 5 pixels, are not interpolated at all. */
#define MARGIN 4

/* Columns that are decoded beside a rectangle at most: MARGIN on each side, and up to 31 to the edge of a block. */
#define EXTRA_COLUMNS (2 * MARGIN + 31)

/* Rows that libjpeg may give at one time. */
#define LINES 16

typedef struct {
    struct jpeg_error_mgr manager; /* first: libjpeg hands it back as its own */
    jmp_buf escape;
    char message[JMSG_LENGTH_MAX];
} Trouble;

typedef struct {
    JDIMENSION left, top, width, height; /* of the image at its scale, pixels */
    unsigned int eighths;
    int to_end;
    JDIMENSION columns; /* of the output */
} Crop;

static void refuse(Trouble *trouble, const char *message)
{
    snprintf(trouble->message, sizeof trouble->message, "%s", message);
    longjmp(trouble->escape, 1);
}

static void on_error(j_common_ptr info)
{
    Trouble *trouble = (Trouble *)info->err;
    (*info->err->format_message)(info, trouble->message);
    longjmp(trouble->escape, 1);
}

/* libjpeg goes on after a warning, with made-up pixels. */
static void on_message(j_common_ptr info, int level)
{
    if (level < 0)
        on_error(info);
}

static void on_output(j_common_ptr info) { (void)info; }

/* Grey, and the samplings that encoders use: others have had faults of their own in cropped decoding. */
static int is_usual(const struct jpeg_decompress_struct *info)
{
    if (info->data_precision != 8)
        return 0;
    if (info->num_components == 1)
        return info->jpeg_color_space == JCS_GRAYSCALE && info->comp_info[0].h_samp_factor == 1 &&
               info->comp_info[0].v_samp_factor == 1;
    if (info->num_components != 3 || (info->jpeg_color_space != JCS_YCbCr && info->jpeg_color_space != JCS_RGB))
        return 0;
    for (int i = 1; i < 3; i++)
        if (info->comp_info[i].h_samp_factor != 1 || info->comp_info[i].v_samp_factor != 1)
            return 0;
    int h = info->comp_info[0].h_samp_factor, v = info->comp_info[0].v_samp_factor;
    return (v == 1 && (h == 1 || h == 2 || h == 4)) || (v == 2 && (h == 1 || h == 2));
}

/* Of a progressive file that lacks scans, libjpeg smooths the blocks by their neighbours, cropped or not. */
static int is_complete(const struct jpeg_decompress_struct *info)
{
    if (!info->progressive_mode || info->coef_bits == NULL)
        return 1;
    for (int i = 0; i < info->num_components; i++)
        for (int k = 0; k < DCTSIZE2; k++)
            if (info->coef_bits[i][k] != 0)
                return 0;
    return 1;
}

static boolean on_mcu(j_decompress_ptr info, JBLOCKROW *blocks)
{
    if (!next_mcu(info->client_data, blocks))
        refuse((Trouble *)info->err, "damaged, or unusual, in the entropy-coded data");
    return TRUE;
}

static void skip_rows(struct jpeg_decompress_struct *info, JDIMENSION num, Trouble *trouble)
{
    if (num > 0 && jpeg_skip_scanlines(info, num) != num)
        refuse(trouble, "libjpeg skips other rows than it was asked to");
}

static JDIMENSION read_rows(struct jpeg_decompress_struct *info, JSAMPARRAY lines, JDIMENSION num, Trouble *trouble)
{
    JDIMENSION got = jpeg_read_scanlines(info, lines, num);
    if (got < 1 || got > num)
        refuse(trouble, "libjpeg gives no more rows");
    return got;
}

/* The column of `out`, height x columns x 3 bytes, in which the rectangle begins; or -1, and trouble->message.
 *
 * height, width: that the image must have; 0: it may have any. */
static int decode_crop(
    const unsigned char *data, size_t size, int height, int width, Crop crop, unsigned char *out, Trouble *trouble)
{
    /* One for each image: its tables would outlive it, and a file that lacks its own have those of another. To keep
     * the memory of one and take the tables from it was measured, and is slower. */
    struct jpeg_decompress_struct decompressor, *const info = &decompressor;
    Entropy entropy;
    memset(info, 0, sizeof *info); /* jpeg_destroy may come before jpeg_create is through */
    info->err = jpeg_std_error(&trouble->manager);
    trouble->manager.error_exit = on_error;
    trouble->manager.emit_message = on_message;
    trouble->manager.output_message = on_output;
    trouble->message[0] = 0;
    if (setjmp(trouble->escape)) { /* of what is set below, only what `info` owns is used here */
        jpeg_destroy_decompress(info);
        return -1;
    }
    jpeg_create_decompress(info);
    jpeg_mem_src(info, (unsigned char *)data, (unsigned long)size);
    jpeg_read_header(info, TRUE);
    if (!is_usual(info))
        refuse(trouble, "an unusual kind of JPEG");
    if (height && ((int)info->image_height != height || (int)info->image_width != width))
        refuse(trouble, "of another size than it was said to be");
    const int is_own = !info->progressive_mode && !info->arith_code && !jpeg_has_multiple_scans(info);
    info->out_color_space = JCS_RGB;
    info->dct_method = JDCT_ISLOW;
    info->scale_num = crop.eighths;
    info->scale_denom = 8;
    jpeg_start_decompress(info); /* of a file of several scans, this decodes all coefficients */
    if (!is_complete(info))
        refuse(trouble, "a progressive JPEG that lacks scans");
    const JDIMENSION rows = info->output_height, columns = info->output_width;
    if (crop.left > columns || crop.width > columns - crop.left || crop.top > rows ||
        crop.height > rows - crop.top || info->output_components != 3)
        refuse(trouble, "the crop is not inside of the image");

    JDIMENSION left = crop.left > MARGIN ? crop.left - MARGIN : 0;
    JDIMENSION end = crop.left + crop.width;
    end = columns - end > MARGIN ? end + MARGIN : columns;
    JDIMENSION num_columns = end - left;
    if (num_columns < columns)
        jpeg_crop_scanline(info, &left, &num_columns); /* moves `left` down to a block's edge, and widens */
    if (left > crop.left || num_columns != info->output_width || num_columns < crop.left - left + crop.width)
        refuse(trouble, "libjpeg decodes other columns than it was asked for");
    if (num_columns > crop.columns)
        refuse(trouble, "out has too few columns");

    /* The columns of MCUs that jpeg_crop_scanline has chosen, by its own rule. */
    const JDIMENSION mcu_columns = (JDIMENSION)info->max_h_samp_factor * crop.eighths;
    if (is_own) {
        if (!begin_scan(&entropy, info, left / mcu_columns, (left + num_columns - 1) / mcu_columns))
            refuse(trouble, "unusual Huffman tables");
        info->client_data = &entropy;
        info->entropy->decode_mcu = on_mcu;
    }
    skip_rows(info, crop.top, trouble);
    const size_t row_bytes = (size_t)crop.columns * 3;
    for (JDIMENSION y = 0; y < crop.height;) {
        JSAMPROW lines[LINES];
        const JDIMENSION num = crop.height - y < LINES ? crop.height - y : LINES;
        for (JDIMENSION line = 0; line < num; line++)
            lines[line] = out + (y + line) * row_bytes;
        y += read_rows(info, lines, num, trouble);
    }
    const JDIMENSION bottom = crop.top + crop.height;
    const JDIMENSION block_rows = (JDIMENSION)info->max_v_samp_factor * crop.eighths;
    const JDIMENSION end_of_blocks = (bottom + block_rows - 1) / block_rows * block_rows;
    if (is_own && (crop.to_end || end_of_blocks >= rows)) {
        if (!end_scan(&entropy))
            refuse(trouble, "damaged, or unusual, behind the crop");
    } else if (crop.to_end || end_of_blocks >= rows) {
        /* All but the last row: libjpeg does not read what it would skip at the very end, damaged or not. */
        if (rows - bottom > 1)
            skip_rows(info, rows - bottom - 1, trouble);
        if (rows > bottom) {
            JSAMPARRAY line = (*info->mem->alloc_sarray)((j_common_ptr)info, JPOOL_IMAGE, num_columns * 3, 1);
            read_rows(info, line, 1, trouble);
        }
        jpeg_finish_decompress(info);
    } else {
        skip_rows(info, end_of_blocks - bottom, trouble);
    }
    jpeg_destroy_decompress(info);
    return (int)(crop.left - left);
}

/* What the headers of a JPEG say. */
typedef struct {
    int height, width;
    int has_one_scan; /* its first scan, which is baseline, has all components: libjpeg refuses a second one */
} Frame;

/* 0: not a JPEG that decode_crop takes, or damaged before its first scan. */
static int read_frame(const unsigned char *data, size_t size, Frame *frame)
{
    int num_components = 0, is_progressive = 0;
    size_t at = 2;
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8)
        return 0;
    while (at + 5 <= size) {
        if (data[at] != 0xFF)
            return 0;
        const int marker = data[at + 1];
        if (marker == 0xFF) { /* a fill byte */
            at++;
            continue;
        }
        const size_t length = (size_t)data[at + 2] << 8 | data[at + 3];
        if (marker == 0xDA) {
            frame->has_one_scan = !is_progressive && data[at + 4] == num_components;
            return num_components > 0;
        }
        if (marker >= 0xC0 && marker <= 0xC2) {
            if (num_components || at + 10 > size || data[at + 4] != 8)
                return 0;
            frame->height = data[at + 5] << 8 | data[at + 6];
            frame->width = data[at + 7] << 8 | data[at + 8];
            num_components = data[at + 9];
            is_progressive = marker == 0xC2;
            if (frame->height < 1 || frame->width < 1)
                return 0;
        } else if ((marker >= 0xC3 && marker <= 0xCF && marker != 0xC4 && marker != 0xCC) || marker < 0xC0 ||
                   (marker >= 0xD0 && marker <= 0xD9) || length < 2) { /* other frames; what has no place here */
            return 0;
        }
        at += 2 + length;
    }
    return 0;
}
#endif
