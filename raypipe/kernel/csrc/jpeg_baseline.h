/* A rectangle of a usual JPEG at full scale, without libjpeg: jpeg_crop.h, which decides when, has the others.
 *
 *     header          tables, sampling, color space             read_baseline
 *     codes           → coefficients of an MCU                  jpeg_huffman.h
 *     coefficients    → samples, in planes                      jpeg_samples.h
 *     samples         → pixels, row by row                      jpeg_samples.h
 *
 * libjpeg prepares more for an image than it takes to decode a tiny one, and decodes more than a crop shows. Usual is:
 * baseline, one scan, YCbCr of 4:4:4, 4:2:2 or 4:2:0, or grays, tables of 8 bits, no damage: in a store nearly all are.
 * Pixels are libjpeg-turbo's to the bit. Bytes are untrusted: what is not quite as expected is refused.
 *
 * Planes hold the samples of two rows of MCUs, in turns, since a row of pixels needs the row of chroma below it.
 */
#ifndef RAYPIPE_JPEG_BASELINE_H
#define RAYPIPE_JPEG_BASELINE_H

#include "jpeg_header.h"
#include "jpeg_huffman.h"
#include "jpeg_samples.h"

#ifdef HAS_AVX2

typedef struct {
    int width, height; /* of the image, pixels */
    int num_components;
    int h, v; /* samples of luma for one of chroma */
    int quant[3], dc[3], ac[3];
    unsigned int interval;
    Reader codes;
} Frame;

/* Tables by their numbers, of the image at hand. */
typedef struct {
    JHUFF_TBL dc[NUM_HUFF_TBLS], ac[NUM_HUFF_TBLS];
    Quants quants[NUM_QUANT_TBLS];
    unsigned int has_dc, has_ac, has_quants;                   /* a bit for each */
} FileTables;

typedef struct {
    Buffer clean, planes, rows;
    FileTables tables;
} Baseline;

static const uint8_t PAIRED_PLACES[NUM_POSITIONS] = PLACES(PAIRED);

static int read_quants(Reader body, FileTables *tables)
{
    while (body.left) {
        uint64_t number; /* and the highest 4 bits: a table of 16 bits */
        Reader values;
        if (!take_big(&body, 1, &number) || number >= NUM_QUANT_TBLS || !take(&body, DCTSIZE2, &values))
            return 0;
        Quants *quants = &tables->quants[number];
        for (int i = 1; i <= DCTSIZE2; i++) {
            const int step = byte_at(&values, (size_t)i - 1);
            quants->steps[PAIRED_PLACES[i]] = (int16_t)step;
            quants->limits[PAIRED_PLACES[i]] = (int16_t)(LARGEST_INPUT / (step ? step : 1));
        }
        tables->has_quants |= 1u << number;
    }
    return 1;
}

static int read_codes(Reader body, FileTables *tables)
{
    while (body.left) {
        uint64_t name;
        Reader lengths, symbols;
        size_t num = 0;
        if (!take_big(&body, 1, &name) || !take(&body, CODE_BITS, &lengths))
            return 0;
        for (int length = 0; length < CODE_BITS; length++)
            num += (size_t)byte_at(&lengths, (size_t)length);
        const unsigned int number = name & 15, is_ac = (unsigned int)name >> 4;
        if (number >= NUM_HUFF_TBLS || is_ac > 1 || !take(&body, num, &symbols))
            return 0;
        JHUFF_TBL *table = is_ac ? &tables->ac[number] : &tables->dc[number];
        Writer bits = writer_of(table->bits, sizeof table->bits);
        Writer values = writer_of(table->huffval, sizeof table->huffval);
        if (!put_zeros(&bits, 1) || !put(&bits, lengths) || !put(&values, symbols) || !put_zeros(&values, values.left))
            return 0;
        *(is_ac ? &tables->has_ac : &tables->has_dc) |= 1u << number;
    }
    return 1;
}

/* What read_header has not told of a frame. */
static int read_components(Reader body, Frame *frame, int ids[3])
{
    const int num = frame->num_components;
    if (!pass(&body, 6)) /* precision, sides and number */
        return 0;
    for (int i = 0; i < num; i++) {
        uint64_t id, factors, quant;
        if (!take_big(&body, 1, &id) || !take_big(&body, 1, &factors) || !take_big(&body, 1, &quant) ||
            quant >= NUM_QUANT_TBLS)
            return 0;
        ids[i] = (int)id;
        frame->quant[i] = (int)quant;
        if (i == 0) {
            frame->h = (int)factors >> 4;
            frame->v = (int)factors & 15;
        } else if (factors != 0x11) {
            return 0;
        }
    }
    if (num == 3 && (ids[0] == ids[1] || ids[1] == ids[2] || ids[0] == ids[2]))
        return 0;
    /* Of rows of fewer than three samples libjpeg does not interpolate. */
    const int is_full = frame->h == 1 && frame->v == 1, is_half = frame->h == 2 && (frame->v == 1 || frame->v == 2);
    return is_full || (num == 3 && is_half && frame->width > 4);
}

static int read_scan(Reader body, Frame *frame, const int ids[3])
{
    uint64_t num, id, tables, selection;
    if (!take_big(&body, 1, &num) || (int)num != frame->num_components)
        return 0;
    for (int i = 0; i < frame->num_components; i++) {
        if (!take_big(&body, 1, &id) || !take_big(&body, 1, &tables) || (int)id != ids[i])
            return 0;
        frame->dc[i] = (int)tables >> 4;
        frame->ac[i] = (int)tables & 15;
        if (frame->dc[i] >= NUM_HUFF_TBLS || frame->ac[i] >= NUM_HUFF_TBLS)
            return 0;
    }
    return take_big(&body, 3, &selection) && selection == (DCTSIZE2 - 1) << 8 && body.left == 0;
}

/* The frame of a header, and its tables. 0: it is not usual. The color space is libjpeg's, by default_decompress_parms. */
static int read_baseline(const Header *header, Frame *frame, FileTables *tables)
{
    int is_jfif = 0, adobe = -1, has_scan = 0, has_frame = 0, ids[3] = {0};
    uint64_t interval;
    *frame = (Frame){.height = header->height, .width = header->width, .num_components = header->num_components,
                     .codes = header->codes};
    tables->has_dc = tables->has_ac = tables->has_quants = 0;
    for (int i = 0; i < header->num_segments; i++) {
        Reader body = header->segments[i].body;
        int is_good = 1;
        switch (header->segments[i].marker) {
        case 0xC0:
        case 0xC1:
            is_good = has_frame = read_components(body, frame, ids);
            break;
        case 0xC4:
            is_good = read_codes(body, tables);
            break;
        case 0xDB:
            is_good = read_quants(body, tables);
            break;
        case 0xDD:
            is_good = take_big(&body, 2, &interval) && body.left == 0;
            frame->interval = is_good ? (unsigned)interval : 0;
            break;
        case 0xE0:
            if (body.left >= 14 && begins_with(&body, "JFIF", 5)) {
                is_good = byte_at(&body, 5) == 1; /* libjpeg warns of other major versions */
                is_jfif = 1;
            }
            break;
        case 0xEE:
            if (body.left >= 12 && begins_with(&body, "Adobe", 5))
                adobe = byte_at(&body, 11);
            break;
        case 0xDA: /* the last one: the frame stands before it */
            is_good = has_scan = has_frame && read_scan(body, frame, ids);
            break;
        default: /* a progressive frame */
            is_good = 0;
        }
        if (!is_good)
            return 0;
    }
    const int is_ycc = is_jfif || (adobe < 0 ? ids[0] == 1 && ids[1] == 2 && ids[2] == 3 : adobe == 1);
    return has_scan && (frame->num_components == 1 || is_ycc);
}

/* What the entropy decoder is told. 0: a table is missing. */
static int scan_of(const Frame *frame, const FileTables *tables, Scan *scan)
{
    const int mcu_width = DCTSIZE * frame->h, mcu_height = DCTSIZE * frame->v;
    *scan = (Scan){.codes = frame->codes, .interval = frame->interval, .places = PAIRED_PLACES,
                   .simd = SIMD_AVX2};
    scan->columns = (JDIMENSION)((frame->width + mcu_width - 1) / mcu_width);
    scan->num_mcus = (unsigned long)scan->columns * (unsigned long)((frame->height + mcu_height - 1) / mcu_height);
    for (int i = 0; i < frame->num_components; i++) {
        const int dc = frame->dc[i], ac = frame->ac[i];
        if (!(tables->has_dc >> dc & 1) || !(tables->has_ac >> ac & 1) || !(tables->has_quants >> frame->quant[i] & 1))
            return 0;
        for (int block = 0; block < (i == 0 ? frame->h * frame->v : 1); block++)
            scan->blocks[scan->num_blocks++] =
                (ScanBlock){.component = i, .dc = dc, .ac = ac, .dc_codes = &tables->dc[dc], .ac_codes = &tables->ac[ac]};
    }
    return 1;
}

/* The samples of two rows of MCUs, of the columns of MCUs that are decoded. */
typedef struct {
    uint8_t *samples;
    ptrdiff_t stride;
    int num_rows; /* of two rows of MCUs */
} Plane;

static inline uint8_t *plane_row(const Plane *plane, int y)
{
    return plane->samples + y % plane->num_rows * plane->stride;
}

/* An MCU's samples from its coefficients; `row` of all MCUs, `column` of those in the planes. 0: refused. */
AVX2 static int put_samples(
    JBLOCK *blocks, const Frame *frame, const Scan *scan, const FileTables *tables, const Plane *planes, int row,
    int column)
{
    for (int i = 0; i < scan->num_blocks; i++) {
        const int component = scan->blocks[i].component, is_luma = component == 0;
        const int h = is_luma ? frame->h : 1, v = is_luma ? frame->v : 1; /* luma's blocks come first */
        const int x = is_luma ? i % h : 0, y = is_luma ? i / h : 0;
        const Plane *plane = &planes[component];
        uint8_t *to = plane_row(plane, (row * v + y) * DCTSIZE) + (column * h + x) * DCTSIZE;
        if (!inverse_dct(blocks[i], &tables->quants[frame->quant[component]], to, plane->stride))
            return 0;
    }
    return 1;
}

/* Rows of chroma as wide as luma's: pixels `first` to `end`, of which the first is even where chroma is narrower. */
typedef struct {
    const Frame *frame;
    int first_column; /* of the planes, pixels */
    int16_t *sums;    /* with one before, and slack */
    uint8_t *wide[2];
} Widening;

AVX2 static const uint8_t *chroma_row(const Widening *how, const Plane *plane, int y, int first, int end, uint8_t *to)
{
    const Frame *frame = how->frame;
    if (frame->h == 1)
        return plane_row(plane, y) + first - how->first_column;
    const int width = (frame->width + 1) / 2, height = (frame->height + 1) / 2;
    const int from = first / 2, until = (end + 1) / 2, before = from > 0, after = until < width;
    const int offset = from - before - how->first_column / 2, num = until - from;
    const uint8_t *near = plane_row(plane, frame->v == 2 ? y / 2 : y) + offset, *far = NULL;
    if (frame->v == 2) {
        const int other = y & 1 ? (y / 2 + 1 < height ? y / 2 + 1 : y / 2) : (y > 1 ? y / 2 - 1 : 0);
        far = plane_row(plane, other) + offset;
    }
    int16_t *sums = how->sums;
    add_rows(near, far, num + before + after, sums - before);
    if (!before)
        sums[-1] = sums[0];
    if (!after)
        sums[num] = sums[num - 1];
    if (far)
        widen(sums, num, 8, 7, 4, to);
    else
        widen(sums, num, 1, 2, 2, to);
    return to;
}

/* Whether the rows of samples that a row of pixels needs are there, of `num_rows` rows of MCUs. */
static inline int is_ready(const Frame *frame, int y, int num_rows)
{
    const int below = frame->v == 2 && y & 1 && y / 2 + 1 < (frame->height + 1) / 2;
    return (frame->v == 2 ? y / 2 + below : y) < num_rows * DCTSIZE;
}

/* The rectangle's pixels in `out`, whose rows are `stride` apart, but for those that are 0 in `rows_read`, if it is there.
 * 0: refused, or there is no memory. */
AVX2 static int decode_baseline(
    Baseline *baseline, Entropy *entropy, HuffmanTables *codes, const Header *header, const Seek *seek,
    Rectangle box, const uint8_t *rows_read, int to_end, uint8_t *out, ptrdiff_t stride)
{
    Frame frame;
    Scan scan;
    FileTables *tables = &baseline->tables;
    if (!read_baseline(header, &frame, tables) || !scan_of(&frame, tables, &scan))
        return 0;
    scan.seek = *seek;
    if (box.left < 0 || box.top < 0 || box.width < 1 || box.height < 1 || box.width > frame.width - box.left ||
        box.height > frame.height - box.top)
        return 0;
    const int mcu_width = DCTSIZE * frame.h, mcu_height = DCTSIZE * frame.v, right = box.left + box.width;
    const int bottom = box.top + box.height;
    /* With a sample of chroma to each side. */
    const int reach_x = frame.h > 1 ? frame.h : 0, reach_y = frame.v > 1 ? frame.v : 0;
    const int first_column = (box.left > reach_x ? box.left - reach_x : 0) / mcu_width;
    const int last_column = ((right + reach_x < frame.width ? right + reach_x : frame.width) - 1) / mcu_width;
    const int first_row = (box.top > reach_y ? box.top - reach_y : 0) / mcu_height;
    const int last_row = ((bottom + reach_y < frame.height ? bottom + reach_y : frame.height) - 1) / mcu_height;

    const size_t clean_bytes = scan.codes.left + PADDING;
    uint8_t *clean = reserve(&baseline->clean, clean_bytes);
    const int num_columns = last_column - first_column + 1;
    const size_t luma_bytes = (size_t)num_columns * (size_t)mcu_width + ROW_SLACK;
    const size_t chroma_bytes = (size_t)num_columns * DCTSIZE + ROW_SLACK;
    const size_t planes_bytes = 2 * ((size_t)mcu_height * luma_bytes + 2 * DCTSIZE * chroma_bytes);
    uint8_t *samples = reserve(&baseline->planes, planes_bytes);
    const size_t sums_bytes = sizeof(int16_t) * (chroma_bytes + ROW_SLACK);
    uint8_t *rows = reserve(&baseline->rows, 3 * (luma_bytes + ROW_SLACK) + sums_bytes);
    if (!clean || !samples || !rows ||
        !begin_scan(entropy, codes, &scan, writer_of(clean, clean_bytes), (JDIMENSION)first_column,
                    (JDIMENSION)last_column))
        return 0;
    Plane planes[3];
    for (int i = 0; i < 3; i++) {
        planes[i] = (Plane){samples, (ptrdiff_t)(i ? chroma_bytes : luma_bytes), 2 * (i ? DCTSIZE : mcu_height)};
        samples += planes[i].num_rows * planes[i].stride;
    }
    const Widening how = {.frame = &frame, .first_column = first_column * mcu_width,
                          .sums = (int16_t *)(rows + 2 * (luma_bytes + ROW_SLACK)) + 32,
                          .wide = {rows, rows + luma_bytes + ROW_SLACK}};

    _Alignas(32) JBLOCK blocks[D_MAX_BLOCKS_IN_MCU];
    JBLOCKROW pointers[D_MAX_BLOCKS_IN_MCU];
    for (int i = 0; i < scan.num_blocks; i++)
        pointers[i] = &blocks[i];
    const int start = frame.h > 1 ? box.left & ~1 : box.left;
    int y = box.top;
    for (int row = 0; row <= last_row; row++) {
        for (int column = 0; column < (int)scan.columns; column++) {
            const int is_wanted = row >= first_row && column >= first_column && column <= last_column;
            if (is_wanted)
                memset(blocks, 0, (size_t)scan.num_blocks * sizeof *blocks);
            if (!next_mcu(entropy, is_wanted ? pointers : NULL))
                return 0;
            if (is_wanted && !put_samples(blocks, &frame, &scan, tables, planes, row, column - first_column))
                return 0;
        }
        for (; row >= first_row && y < bottom && is_ready(&frame, y, row + 1); y++) {
            if (rows_read && !rows_read[y - box.top])
                continue;
            const uint8_t *chroma[2] = {NULL, NULL};
            for (int i = 1; i < frame.num_components; i++)
                chroma[i - 1] = chroma_row(&how, &planes[i], y, start, right, how.wide[i - 1]) + box.left - start;
            convert_row(plane_row(&planes[0], y) + box.left - how.first_column, chroma[0], chroma[1], box.width,
                        out + (y - box.top) * stride);
        }
    }
    return to_end || last_row * mcu_height + mcu_height >= frame.height ? end_scan(entropy) : 1;
}
#endif
#endif
