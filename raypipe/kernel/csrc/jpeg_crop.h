/* A rectangle of a JPEG, decoded without the rest.
 *
 * Columns outside the rectangle are entropy-decoded only, and so are rows above and below it: the inverse DCT,
 * upsampling and color conversion are left out there, and jpeg_huffman.h reads the codes. With `to_end` the file is
 * still read to its end, so that damage anywhere is found, as a full decode finds it; without, a file of one scan is
 * read to the end of the blocks that the rectangle's last row is in. Pixels are those of a full decode, to the bit:
 * libjpeg treats the edge of what it decodes as the edge of the image when it upsamples chroma, so MARGIN more columns
 * are decoded on each side.
 *
 * Whatever is unusual (a color space, a sampling, an unfinished progressive file) or wrong (any warning) is refused;
 * the caller then decodes the whole image by its usual way, which has the last word.
 *
 * Bytes are untrusted: libjpeg's errors come back through longjmp, its messages are never printed, and no size is
 * used before it has been compared with what libjpeg says of the image.
 *
 * A Decoder is used for one image after the other, since making one costs as much as decoding a tiny image. Nothing
 * of an image must reach the next: libjpeg keeps tables, see forget_tables; and an error ends its decompressor. Nor may
 * anything grow with the number of images: what libjpeg takes and never gives back is counted, see MOST_LASTING_BYTES.
 *
 * Behind setjmp, only the Decoder is used, which holds the pointer to all that has to be freed.
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

#include "jpeg_baseline.h"
#include "jpeg_entropy.h"
#include "jpeg_header.h"
#include "jpeg_huffman.h"

/* Output columns. Chroma's interpolation reaches 1 chroma sample to each side, which is 2 pixels; and rows of fewer
 * than 3 chroma samples, 5 pixels, are not interpolated at all. */
#define MARGIN 4

/* Columns of the output beside the rectangle, at most: MARGIN on each side, and up to 31 to a block's edge. */
#define EXTRA_COLUMNS 39

/* Rows that libjpeg may give at one time. */
#define LINES 16

typedef struct {
    struct jpeg_error_mgr manager; /* first: libjpeg hands it back as its own */
    jmp_buf escape;
    char message[JMSG_LENGTH_MAX];
} Trouble;

typedef struct {
    JDIMENSION left, top, width, height; /* pixels */
    int to_end;
    JDIMENSION columns; /* of the output */
} Crop;

typedef struct {
    struct jpeg_decompress_struct info;
    Trouble trouble;
    Entropy entropy;
    HuffmanTables tables; /* most files of a store have the same ones */
    JHUFF_TBL one_code;
    int is_made;
    void *(*allocate)(j_common_ptr info, int pool, size_t size); /* libjpeg's own */
    size_t lasting_bytes;                                        /* taken since it was made, for as long as it lives */
#ifdef HAS_AVX2
    Baseline baseline;
#endif
} Decoder;

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

/* Gray, and the samplings that encoders use: others have had faults of their own in cropped decoding. */
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

/* Of a progressive file that lacks scans, libjpeg smooths the blocks by their neighbors, cropped or not. */
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

/* Whether libjpeg's entropy decoder is replaced: only where its struct was seen to be as jpeg_entropy.h has it. */
#ifdef CHECKED_ENTROPY
#define REPLACES_ENTROPY 1
#else
#define REPLACES_ENTROPY 0
#endif

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

/* Frees what libjpeg holds; the next image makes it anew. */
static void end_decoder(Decoder *decoder)
{
    jpeg_destroy_decompress(&decoder->info);
    decoder->is_made = 0;
}

/* Of memory that libjpeg frees with the decompressor alone; with more, the next image gets a new one.
 *
 * libjpeg takes such memory for each table that it has no place for: for those that forget_tables has dropped, those
 * between the scans of a progressive file, and the standard's where a file has none. It looks through all that it has
 * taken whenever it takes more. The tables of a usual file, all kinds of them, need 3 KiB. */
#define MOST_LASTING_BYTES 16384

static void *count_and_allocate(j_common_ptr info, int pool, size_t size)
{
    Decoder *decoder = (Decoder *)info; /* its first field */
    if (pool == JPOOL_PERMANENT)
        decoder->lasting_bytes += size;
    return decoder->allocate(info, pool, size);
}

static void begin_decoder(Decoder *decoder)
{
    memset(&decoder->info, 0, sizeof decoder->info); /* end_decoder may come before jpeg_create is through */
    decoder->info.err = jpeg_std_error(&decoder->trouble.manager);
    decoder->trouble.manager.error_exit = on_error;
    decoder->trouble.manager.emit_message = on_message;
    decoder->trouble.manager.output_message = on_output;
    jpeg_create_decompress(&decoder->info);
    decoder->allocate = decoder->info.mem->alloc_small;
    decoder->info.mem->alloc_small = count_and_allocate;
    decoder->lasting_bytes = 0;
    decoder->is_made = 1;
}

/* In places of a table that a file's own always changes, or hardly ever leaves as it is. */
#define STALE_HUFFMAN 1 /* bits[0]: libjpeg sets it to 0 */
#define STALE_QUANT(k) ((UINT16)(0xDEAD + (k) * 257))

/* Marks the tables that the decompressor still has, of the image before. */
static void mark_tables(struct jpeg_decompress_struct *info)
{
    for (int i = 0; i < NUM_HUFF_TBLS; i++) {
        if (info->dc_huff_tbl_ptrs[i])
            info->dc_huff_tbl_ptrs[i]->bits[0] = STALE_HUFFMAN;
        if (info->ac_huff_tbl_ptrs[i])
            info->ac_huff_tbl_ptrs[i]->bits[0] = STALE_HUFFMAN;
    }
    for (int i = 0; i < NUM_QUANT_TBLS; i++)
        for (int k = 0; info->quant_tbl_ptrs[i] && k < DCTSIZE2; k++)
            info->quant_tbl_ptrs[i]->quantval[k] = STALE_QUANT(k);
}

/* Takes away those that the header has not replaced: an image without tables must not be read by another one's. */
static void forget_tables(struct jpeg_decompress_struct *info)
{
    for (int i = 0; i < NUM_HUFF_TBLS; i++) {
        if (info->dc_huff_tbl_ptrs[i] && info->dc_huff_tbl_ptrs[i]->bits[0] == STALE_HUFFMAN)
            info->dc_huff_tbl_ptrs[i] = NULL;
        if (info->ac_huff_tbl_ptrs[i] && info->ac_huff_tbl_ptrs[i]->bits[0] == STALE_HUFFMAN)
            info->ac_huff_tbl_ptrs[i] = NULL;
    }
    for (int i = 0; i < NUM_QUANT_TBLS; i++) {
        int k = 0;
        while (info->quant_tbl_ptrs[i] && k < DCTSIZE2 && info->quant_tbl_ptrs[i]->quantval[k] == STALE_QUANT(k))
            k++;
        if (k == DCTSIZE2)
            info->quant_tbl_ptrs[i] = NULL;
    }
}

/* Starts with tables of one code in place of the file's: libjpeg expands those into tables of its own, which takes a
 * tenth of the time of a tiny image, and jpeg_huffman.h has no use for them. It checks the file's as libjpeg does. */
static void start_without_tables(struct jpeg_decompress_struct *info, JHUFF_TBL *one_code)
{
    JHUFF_TBL *dc[NUM_HUFF_TBLS], *ac[NUM_HUFF_TBLS];
    memset(one_code, 0, sizeof *one_code);
    one_code->bits[1] = 1;
    for (int i = 0; i < NUM_HUFF_TBLS; i++) { /* where there is none, libjpeg may put in the standard's */
        dc[i] = info->dc_huff_tbl_ptrs[i];
        ac[i] = info->ac_huff_tbl_ptrs[i];
        if (dc[i])
            info->dc_huff_tbl_ptrs[i] = one_code;
        if (ac[i])
            info->ac_huff_tbl_ptrs[i] = one_code;
    }
    jpeg_start_decompress(info); /* an error ends the decompressor, with these tables */
    for (int i = 0; i < NUM_HUFF_TBLS; i++) {
        if (dc[i])
            info->dc_huff_tbl_ptrs[i] = dc[i];
        if (ac[i])
            info->ac_huff_tbl_ptrs[i] = ac[i];
    }
}

/* The column of `out`, height x columns x 3 bytes, in which the rectangle begins; or -1, and trouble->message. The header
 * is that of `data`, from read_header. Of `rows_read`, a byte for each, those that are 0 may be left as they are; NULL: none. */
static int decode_crop(
    Decoder *decoder, const Header *header, const unsigned char *data, size_t size, Crop crop, const uint8_t *rows_read,
    int simd, unsigned char *out)
{
    struct jpeg_decompress_struct *info = &decoder->info;
    Trouble *trouble = &decoder->trouble;
    Entropy *entropy = &decoder->entropy;
    trouble->message[0] = 0;
    const Seek seek = find_seek(reader_of(data, size));
    if (seek.checksum && !is_undamaged(&seek)) {
        snprintf(trouble->message, sizeof trouble->message, "its checksum is wrong");
        return -1;
    }
#ifdef HAS_AVX2
    const Rectangle box = {(int)crop.left, (int)crop.top, (int)crop.width, (int)crop.height};
    if (simd == SIMD_AVX2 && crop.width <= crop.columns &&
        decode_baseline(&decoder->baseline, entropy, &decoder->tables, header, &seek, box, rows_read, crop.to_end,
                        out, (ptrdiff_t)crop.columns * 3))
        return 0;
#endif
    if (setjmp(trouble->escape)) {
        end_decoder(decoder);
        return -1;
    }
    if (decoder->is_made && decoder->lasting_bytes > MOST_LASTING_BYTES)
        end_decoder(decoder);
    if (!decoder->is_made)
        begin_decoder(decoder);
    mark_tables(info);
    jpeg_mem_src(info, (unsigned char *)data, (unsigned long)size);
    jpeg_read_header(info, TRUE);
    forget_tables(info);
    if ((int)info->image_height != header->height || (int)info->image_width != header->width ||
        info->num_components != header->num_components || (info->progressive_mode != 0) != header->is_progressive)
        refuse(trouble, "libjpeg reads another header");
    if (!is_usual(info))
        refuse(trouble, "an unusual kind of JPEG");
    const int is_own = REPLACES_ENTROPY && !info->progressive_mode && !info->arith_code && !jpeg_has_multiple_scans(info);
    info->out_color_space = JCS_RGB;
    info->dct_method = JDCT_ISLOW;
    if (is_own)
        start_without_tables(info, &decoder->one_code);
    else
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
    JDIMENSION width = end - left;
    jpeg_crop_scanline(info, &left, &width); /* moves `left` down to a block's edge, and widens */
    if (left > crop.left || width != info->output_width || width < crop.left - left + crop.width)
        refuse(trouble, "libjpeg decodes other columns than it was asked for");
    if (width > crop.columns)
        refuse(trouble, "out has too few columns");

    /* The columns of MCUs that jpeg_crop_scanline has chosen, by its own rule. */
    const JDIMENSION mcu_columns = (JDIMENSION)info->max_h_samp_factor * DCTSIZE;
    if (is_own) {
        Scan scan;
        scan_of_libjpeg(info, &scan);
        scan.seek = seek;
        scan.simd = simd;
        const size_t clean_bytes = scan.codes.left + PADDING;
        const Writer clean =
            writer_of((*info->mem->alloc_large)((j_common_ptr)info, JPOOL_IMAGE, clean_bytes), clean_bytes);
        if (!begin_scan(entropy, &decoder->tables, &scan, clean, left / mcu_columns, (left + width - 1) / mcu_columns))
            refuse(trouble, "unusual Huffman tables, or rows that are not where they should be");
        info->client_data = entropy;
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
    const JDIMENSION block_rows = (JDIMENSION)info->max_v_samp_factor * DCTSIZE;
    const JDIMENSION end_of_blocks = (bottom + block_rows - 1) / block_rows * block_rows;
    if (is_own && (crop.to_end || end_of_blocks >= rows)) {
        if (!end_scan(entropy))
            refuse(trouble, "damaged, or unusual, behind the crop");
    } else if (crop.to_end || end_of_blocks >= rows) {
        /* All but the last row: libjpeg does not read what it would skip at the very end, damaged or not. */
        if (rows - bottom > 1)
            skip_rows(info, rows - bottom - 1, trouble);
        if (rows > bottom) {
            JSAMPARRAY line = (*info->mem->alloc_sarray)((j_common_ptr)info, JPOOL_IMAGE, width * 3, 1);
            read_rows(info, line, 1, trouble);
        }
        jpeg_finish_decompress(info);
    } else {
        skip_rows(info, end_of_blocks - bottom, trouble);
    }
    jpeg_abort_decompress(info);
    return (int)(crop.left - left);
}
#endif
