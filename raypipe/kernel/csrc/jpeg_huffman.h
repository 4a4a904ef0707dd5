/* A Huffman decoder of baseline JPEG that takes the place of libjpeg's own, for jpeg_crop.h.
 *
 * More than half of the time of a decode goes into entropy decoding, and a crop saves none of it above its last row:
 * every code has to be read to know where the next begins. But of a block outside of the crop nothing is wanted
 * except its length and its DC difference. So the AC codes of such blocks are skipped by a table that takes up to
 * three codes, each with the bits of its value, at one look; and those inside are decoded by a table that gives run
 * and value in one look, for all but long codes. libjpeg looks twice for every code and value.
 *
 * It is put into `decode_mcu` (jpeg_entropy.h), which libjpeg's coefficient controller calls for the next MCU: with
 * blocks to fill (zeroed), or NULL for what jpeg_skip_scanlines skips. All else stays libjpeg's. Coefficients are libjpeg's to the
 * bit, in damaged data as well, as far as it accepts them; what it warns of, and whatever else is not quite as the
 * standard has it, is refused, and the caller decodes the image by its usual way.
 *
 * Bytes are untrusted. Those between two markers are first copied without the zeros that are stuffed behind 0xFF,
 * with PADDING zeros at the end, which is more than the longest MCU can be. So nothing is checked within an MCU, and
 * after each one that it did not end behind the data. A table cannot lead out of a block: PLACES has an entry for each
 * position that a look can lead to.
 */
#ifndef RAYPIPE_JPEG_HUFFMAN_H
#define RAYPIPE_JPEG_HUFFMAN_H

#include <stdint.h>
#include <string.h>

#include <jpeglib.h>

#include "bounds.h"
#include "jpeg_seek.h"
#include "versions.h"

/* Bits of a look. Tables are built for every image, in 2^SKIP_BITS and 2^LOOK_BITS steps. */
#define LOOK_BITS 11
#define SKIP_BITS 10
#define PAIR_BITS 11
#define MANY_BYTES 8192 /* of a scan, for which it pays to build a table of pairs */
#define CODE_BITS 16  /* of the longest code */
#define VALUE_BITS 15 /* of the longest value */
#define MAX_JOINED 3  /* codes in a look that skips */
#define END_OF_BLOCK 128
#define PAIR_END 63 /* END_OF_BLOCK in a pair: beyond the block from any position */

/* Bytes of the longest MCU, and of a refill beyond it. */
#define PADDING (D_MAX_BLOCKS_IN_MCU * DCTSIZE2 * (CODE_BITS + VALUE_BITS) / 8 + 32)

typedef struct {
    JHUFF_TBL source; /* what it was built of */
    int is_dc, is_built;
    /* By the next LOOK_BITS: value << 16 | advance << 8 | bits, with the bits of the value; 0 = they are not all in
     * sight. The advance is that of the position in the block: run + 1, or END_OF_BLOCK. */
    int32_t look[1 << LOOK_BITS];
    /* By the next PAIR_BITS, of an AC table: one code with its value or two; from the lowest bits on, the bits of all (6)
     * and their advance (6), the first's advance (5), the first value (8) and the last (7). 0 = a longer code, or a larger
     * value. Of one alone, the last value is 0. Two such tables take half of an L1 cache of 32 KB: with 64 bits for an entry
     * they filled it, and the loop took a seventh more time. */
    uint32_t pairs[1 << PAIR_BITS];
    int has_pairs;
    /* By the next SKIP_BITS: advance << 8 | bits, of up to three codes and values; 0 = a longer code. */
    uint16_t skip[1 << SKIP_BITS];
    /* By the next LOOK_BITS: length << 8 | symbol of a code, whose value may be longer; 0 = a longer code. */
    uint16_t codes[1 << LOOK_BITS];
    /* By the length of a code: the first 16 bits, as a number, of what is longer; and where its symbols begin. */
    uint32_t limit[CODE_BITS + 1];
    int32_t offset[CODE_BITS + 1];
} Table;

typedef struct {
    Table dc[NUM_HUFF_TBLS], ac[NUM_HUFF_TBLS];
} HuffmanTables;

/* A block of an MCU: of which component, and by which tables. */
typedef struct {
    int component, dc, ac;
    const JHUFF_TBL *dc_codes, *ac_codes;
} ScanBlock;

/* A baseline scan. */
typedef struct {
    Reader codes;       /* from the first one to the end of the file */
    JDIMENSION columns; /* MCUs of a row */
    unsigned long num_mcus;
    unsigned int interval; /* MCUs between restarts, 0: there are none */
    int num_blocks;        /* of an MCU */
    const uint8_t *places; /* of coefficients: PLACES */
    Seek seek;             /* of a seekable file, whose end is the scan's */
    int simd;              /* vector instructions that may be used */
    ScanBlock blocks[D_MAX_BLOCKS_IN_MCU];
} Scan;

typedef struct {
    Reader codes, raw;                  /* of the scan; and what is not copied yet, at a marker or at the end */
    Writer clean;                       /* room for the bytes between two markers, without stuffing */
    const unsigned char *next;          /* not in `bits` yet, in `clean` */
    const unsigned char *end;           /* of `clean`, before the padding */
    uint64_t bits;                      /* the next ones, at the top; zeros, or more of the next ones, below `count` */
    int count;
    JDIMENSION columns, column, first_column, last_column; /* MCUs: a row's, the next one, and those wanted */
    unsigned long left;                                    /* MCUs of the scan */
    unsigned int interval, until_restart, restarts;        /* MCUs between restarts, 0: there are none */
    int num_blocks, by_pairs;
    const uint8_t *places;
    int component[D_MAX_BLOCKS_IN_MCU];
    const Table *dc[D_MAX_BLOCKS_IN_MCU], *ac[D_MAX_BLOCKS_IN_MCU];
    uint32_t last_dc[MAX_COMPS_IN_SCAN]; /* as libjpeg's, but unsigned: damage makes it overflow */
    Seek seek;
    size_t row, open_row; /* of a seekable file: the next MCU's, and one more than the row that `clean` is of */
} Entropy;

/* The coefficients of a block as they come, each by its place in natural order, row by row. */
#define ZIGZAG(AT) \
    AT(0), AT(1), AT(8), AT(16), AT(9), AT(2), AT(3), AT(10), AT(17), AT(24), AT(32), AT(25), AT(18), AT(11), AT(4), \
    AT(5), AT(12), AT(19), AT(26), AT(33), AT(40), AT(48), AT(41), AT(34), AT(27), AT(20), AT(13), AT(6), AT(7), \
    AT(14), AT(21), AT(28), AT(35), AT(42), AT(49), AT(56), AT(57), AT(50), AT(43), AT(36), AT(29), AT(22), AT(15), \
    AT(23), AT(30), AT(37), AT(44), AT(51), AT(58), AT(59), AT(52), AT(45), AT(38), AT(31), AT(39), AT(46), AT(53), \
    AT(60), AT(61), AT(54), AT(47), AT(55), AT(62), AT(63)

/* By a position in a block, behind a coefficient: where that one is. Behind the block it is the last one, as in libjpeg:
 * damaged runs end there, and so do those of END_OF_BLOCK, which write a zero where there is one. */
#define NUM_POSITIONS (DCTSIZE2 + END_OF_BLOCK + 16)
#define PLACES(AT) {0, ZIGZAG(AT), [DCTSIZE2 + 1 ... NUM_POSITIONS - 1] = DCTSIZE2 - 1}
#define NATURAL(place) (place)
static const uint8_t NATURAL_PLACES[NUM_POSITIONS] = PLACES(NATURAL);

/* Figure F.12 of the standard: `size` > 0 bits as a signed value. */
static inline int extend(uint32_t value, int size) { return (int)value - (value >> (size - 1) ? 0 : (1 << size) - 1); }

static inline int advance_of(int symbol)
{
    return (symbol & 15) || symbol == 0xF0 ? (symbol >> 4) + 1 : END_OF_BLOCK;
}

/* What follows is done for each image whose tables are not those of the last: loops without branches, over pointers,
 * of which a compiler makes vector loops where there is AVX2. Conditions are 0 or -1. */
#define ALL_IF(condition) (-(uint32_t)(condition))

/* Fills table->skip: one code with the bits of its value, then those that follow, where all of such a code is in sight,
 * if not its value. */
INLINE void join_codes_body(Table *table)
{
    uint32_t first[1 << SKIP_BITS]; /* the code's length << 16 | advance << 8 | bits; 0: a longer code */
    const uint16_t *codes = table->codes;
    uint32_t *single = first;
    for (uint32_t at = 0; at < 1u << SKIP_BITS; at++) {
        const uint32_t code = codes[at << (LOOK_BITS - SKIP_BITS)], length = code >> 8, symbol = code & 255;
        const uint32_t end = ALL_IF(((symbol & 15) == 0) & (symbol != 0xF0));
        const uint32_t advance = (end & END_OF_BLOCK) | (~end & ((symbol >> 4) + 1));
        const uint32_t is_known = ALL_IF((length != 0) & (length <= SKIP_BITS));
        single[at] = is_known & (length << 16 | advance << 8 | (length + (symbol & 15)));
    }
    uint16_t *skip = table->skip;
    for (uint32_t at = 0; at < 1u << SKIP_BITS; at++) {
        uint32_t joined = single[at] & 0xFFFF;
        for (int codes_left = MAX_JOINED - 1; codes_left > 0; codes_left--) {
            const uint32_t bits = joined & 255, advance = joined >> 8;
            const uint32_t next = single[at << bits & ((1u << SKIP_BITS) - 1)];
            const uint32_t is_in_sight =
                ALL_IF((advance < END_OF_BLOCK) & (bits < SKIP_BITS) & (bits + (next >> 16) <= SKIP_BITS));
            joined += next & 0xFFFF & is_in_sight & ALL_IF(joined != 0);
        }
        skip[at] = (uint16_t)joined;
    }
}
VERSIONS(join_codes, (Table * table), (table))

/* Fills table->pairs, by looks at the first code and at what follows it. */
INLINE void join_pairs_body(Table *table)
{
    _Static_assert(PAIR_BITS == LOOK_BITS, "a look finds all that is in sight");
    uint32_t small[1 << PAIR_BITS]; /* of `look`, what has a value of -128 to 127; 0: the rest */
    const uint32_t *look = (const uint32_t *)table->look;
    uint32_t *single = small;
    for (uint32_t at = 0; at < 1u << PAIR_BITS; at++)
        single[at] = look[at] & ALL_IF((((look[at] >> 16) + 128) & 0xFFFF) < 256);
    uint32_t *pairs = table->pairs;
    for (uint32_t at = 0; at < 1u << PAIR_BITS; at++) {
        const uint32_t first = single[at], bits = first & 255, advance = first >> 8 & 255;
        const uint32_t next = single[at << bits & ((1u << PAIR_BITS) - 1)];
        const uint32_t is_end = ALL_IF(advance == END_OF_BLOCK);
        const uint32_t is_pair = ALL_IF((first != 0) & (next != 0) & (bits + (next & 255) <= PAIR_BITS) &
                                        ((((next >> 16) + 64) & 0xFFFF) < 128)) & ~is_end;
        const uint32_t all_bits = bits + (next & 255 & is_pair), all_advance = advance + (next >> 8 & 255 & is_pair);
        const uint32_t most = all_advance < PAIR_END ? all_advance : PAIR_END;
        const uint32_t one = (advance & ~is_end) | (1 & is_end); /* END_OF_BLOCK writes a zero where there is one */
        const uint32_t values = (first >> 16 & 255) | (next >> 16 & 127 & is_pair) << 8;
        pairs[at] = all_bits | most << 6 | one << 12 | values << 17;
    }
    table->has_pairs = 1;
}
VERSIONS(join_pairs, (Table * table), (table))

/* 0: not a table. */
static int build(Table *table, const JHUFF_TBL *source, int is_dc, int simd)
{
    if (table->is_built && table->is_dc == is_dc && memcmp(table->source.bits, source->bits, 17) == 0 &&
        memcmp(table->source.huffval, source->huffval, 256) == 0)
        return 1;
    table->source = *source;
    table->is_dc = is_dc;
    table->is_built = table->has_pairs = 0;
    memset(table->look, 0, sizeof table->look);
    memset(table->codes, 0, sizeof table->codes);
    uint32_t code = 0;
    int num = 0;
    for (int length = 1; length <= CODE_BITS; length++, code <<= 1) {
        table->offset[length] = num - (int)code;
        for (int i = 0; i < source->bits[length]; i++, num++, code++) {
            if (num >= 256 || code >> length)
                return 0;
            const int symbol = source->huffval[num], size = symbol & 15, bits = length + size;
            if (is_dc && symbol > VALUE_BITS)
                return 0;
            const uint32_t first = length <= LOOK_BITS ? code << (LOOK_BITS - length) : 0;
            const uint32_t num_looks = length <= LOOK_BITS ? 1u << (LOOK_BITS - length) : 0;
            uint16_t *codes = table->codes + first;
            for (uint32_t at = 0; at < num_looks; at++)
                codes[at] = (uint16_t)(length << 8 | symbol);
            if (bits <= LOOK_BITS) {
                const int32_t counts = (is_dc ? 1 : advance_of(symbol)) << 8 | bits;
                int32_t *look = table->look + first;
                for (uint32_t at = 0; at < num_looks; at++) {
                    const int value = size ? extend(at >> (LOOK_BITS - bits), size) : 0;
                    look[at] = (int32_t)((uint32_t)value << 16) | counts;
                }
            }
        }
        if (source->bits[length] && code >> length) /* no code is of ones alone: libjpeg refuses such a table */
            return 0;
        table->limit[length] = code << (CODE_BITS - length);
    }
    if (!is_dc)
        join_codes(simd, table);
    table->is_built = 1;
    return 1;
}

/* Copies what comes before the next marker, and zeros behind it. 0: there is no room for it. */
static int begin_segment(Entropy *e)
{
    Writer to = e->clean;
    int is_stuffed;
    do {
        const size_t num = num_before(&e->raw, 0xFF);
        Reader codes;
        is_stuffed = byte_at(&e->raw, num) == 0xFF && byte_at(&e->raw, num + 1) == 0;
        if (!take(&e->raw, num + (size_t)is_stuffed, &codes) || !put(&to, codes) || !pass(&e->raw, (uint64_t)is_stuffed))
            return 0;
    } while (is_stuffed);
    e->next = e->clean.at;
    e->end = to.at;
    if (!put_zeros(&to, PADDING))
        return 0;
    e->bits = 0;
    e->count = 0;
    memset(e->last_dc, 0, sizeof e->last_dc);
    return 1;
}

/* Bits that are left of the segment; negative: it was overrun. */
static inline int64_t bits_left(const Entropy *e) { return (int64_t)(e->end - e->next) * 8 + e->count; }

static int is_marker(const Entropy *e, int code)
{
    return bits_left(e) < 8 && byte_at(&e->raw, 0) == 0xFF && byte_at(&e->raw, 1) == code;
}

static inline uint64_t load(const unsigned char *from)
{
    uint64_t word;
    memcpy(&word, from, sizeof word);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* At least 56 bits. What is loaded again is what stands there already. */
#define REFILL \
    do { \
        bits |= load(next) >> count; \
        next += (63 - count) >> 3; \
        count |= 56; \
    } while (0)
#define DROP(num) (bits <<= (num), count -= (int)(num))
/* Takes back so many bits. */
#define RETURN(num) \
    do { \
        count += (int)(num); \
        next -= count >> 3; \
        count &= 7; \
        bits = load(next - 1) << (8 - count); \
    } while (0)

/* A symbol and its value, however long; both were in `bits`. Returns 0 from where it is used: no such code. */
#define LONG_SYMBOL(table, symbol, value) \
    do { \
        int length = (table)->codes[bits >> (64 - LOOK_BITS)]; \
        if (length) { \
            symbol = length & 255; \
            length >>= 8; \
        } else { \
            const uint32_t ahead = (uint32_t)(bits >> (64 - CODE_BITS)); \
            length = LOOK_BITS + 1; \
            while (length <= CODE_BITS && ahead >= (table)->limit[length]) \
                length++; \
            if (length > CODE_BITS) \
                return 0; \
            symbol = (table)->source.huffval[(int)(ahead >> (CODE_BITS - length)) + (table)->offset[length]]; \
        } \
        DROP(length); \
        const int size = symbol & 15; \
        value = size ? extend((uint32_t)(bits >> (64 - size)), size) : 0; \
        DROP(size); \
    } while (0)

/* Looks at an AC table: each takes what it finds. What stands behind a block's last coefficient is the next block's:
 * decode_blocks gives it back. */
#define SKIP_CODES \
    { \
        skip = table->skip[bits >> (64 - SKIP_BITS)]; \
        if (__builtin_expect(!skip, 0)) { \
            LONG_SYMBOL(table, symbol, value); \
            position += (size_t)advance_of(symbol); \
            continue; \
        } \
        position += skip >> 8; \
        DROP(skip & 63); \
    }
#define DECODE_LONG \
    do { \
        LONG_SYMBOL(table, symbol, value); \
        position += (size_t)advance_of(symbol); \
        block[places[position]] = (JCOEF)value; \
    } while (0)
#define DECODE_PAIR \
    { \
        pair = table->pairs[bits >> (64 - PAIR_BITS)]; \
        if (__builtin_expect(!pair, 0)) { \
            DECODE_LONG; \
            continue; \
        } \
        const size_t first = position + (pair >> 12 & 31); \
        position += pair >> 6 & 63; \
        block[places[position]] = (JCOEF)((int32_t)pair >> 25); \
        block[places[first]] = (JCOEF)((int32_t)(pair << 7) >> 24); \
        DROP(pair & 63); \
    }
#define DECODE_CODE \
    { \
        const int32_t entry = table->look[bits >> (64 - LOOK_BITS)]; \
        if (__builtin_expect(!entry, 0)) { \
            DECODE_LONG; \
            continue; \
        } \
        position += entry >> 8 & 255; \
        block[places[position]] = (JCOEF)(entry >> 16); \
        DROP(entry & 63); \
    }

/* A block's AC codes. Three looks take at most 22 + 31 of the 56 bits of a refill: to ask before each of them how many
 * are left costs more, since the answer cannot be foreseen. */
#define AC_CODES(LOOK) \
    while (position < DCTSIZE2) { \
        REFILL; \
        LOOK \
        if (position >= DCTSIZE2) \
            break; \
        LOOK \
        if (position >= DCTSIZE2) \
            break; \
        LOOK \
    }

/* Whether a look went on behind a block's last coefficient: it was at the end neither by that one nor by END_OF_BLOCK. */
static inline int is_beyond(size_t position)
{
    return position != DCTSIZE2 && position - END_OF_BLOCK - 1 >= DCTSIZE2 - 1;
}

/* The next MCU. blocks: filled, where they are wanted; NULL: none is. */
INLINE int decode_blocks(Entropy *e, JBLOCKROW *blocks)
{
    const unsigned char *next = e->next;
    uint64_t bits = e->bits;
    int count = e->count;
    const uint8_t *places = e->places;
    for (int number = 0; number < e->num_blocks; number++) {
        const Table *table = e->dc[number];
        int symbol, value = 0;
        REFILL;
        const int32_t entry = table->look[bits >> (64 - LOOK_BITS)];
        if (entry) {
            DROP(entry & 255);
            value = entry >> 16;
        } else {
            LONG_SYMBOL(table, symbol, value);
        }
        const uint32_t dc = e->last_dc[e->component[number]] += (uint32_t)value;
        table = e->ac[number];
        size_t position = 1;
        if (!blocks) { /* what is skipped may have its value behind what is in sight: two looks take 25 + 31 bits */
            unsigned int skip = 0;
            while (position < DCTSIZE2) {
                REFILL;
                SKIP_CODES
                if (position >= DCTSIZE2)
                    break;
                SKIP_CODES
            }
            if (__builtin_expect(is_beyond(position) && skip, 0)) {
                /* Codes of the last look are the next block's: now one by one. */
                position -= skip >> 8;
                RETURN(skip & 63);
                while (position < DCTSIZE2) {
                    REFILL;
                    LONG_SYMBOL(table, symbol, value);
                    position += (size_t)advance_of(symbol);
                }
            }
            continue;
        }
        JCOEF *block = *blocks[number];
        block[0] = (JCOEF)dc;
        if (e->by_pairs) {
            uint32_t pair = 0;
            AC_CODES(DECODE_PAIR)
            const size_t first = position - (pair >> 6 & 63) + (pair >> 12 & 31);
            if (__builtin_expect(first >= DCTSIZE2 && pair, 0)) { /* another one would be the next block's */
                RETURN(pair & 63);
                REFILL;
                const int32_t last = table->look[bits >> (64 - LOOK_BITS)];
                block[DCTSIZE2 - 1] = (JCOEF)(last >> 16);
                DROP(last & 63);
            }
        } else {
            AC_CODES(DECODE_CODE)
        }
    }
    e->next = next;
    e->bits = bits;
    e->count = count;
    return bits_left(e) >= 0;
}

/* The scan of which libjpeg is at the beginning, after jpeg_start_decompress, of a file of one baseline scan. */
static void scan_of_libjpeg(j_decompress_ptr info, Scan *scan)
{
    *scan = (Scan){.columns = info->MCUs_per_row, .interval = info->restart_interval};
    scan->codes = reader_of(info->src->next_input_byte, info->src->bytes_in_buffer);
    scan->num_mcus = (unsigned long)info->MCUs_per_row * info->MCU_rows_in_scan;
    scan->num_blocks = info->blocks_in_MCU;
    scan->places = NATURAL_PLACES;
    for (int number = 0; number < scan->num_blocks; number++) {
        const int at = info->MCU_membership[number];
        const jpeg_component_info *component = info->cur_comp_info[at];
        const int dc = component->dc_tbl_no, ac = component->ac_tbl_no;
        scan->blocks[number] = (ScanBlock){at, dc, ac, info->dc_huff_tbl_ptrs[dc], info->ac_huff_tbl_ptrs[ac]};
    }
}

/* Whether the places of rows are those of this scan: the codes have a restart marker before each of them, in turns, and
 * no other marker up to the file's end. A place that is right for itself may still skip rows, or lie behind the end. */
static int begin_seeking(const Entropy *e)
{
    const size_t before = e->seek.file.left - e->codes.left; /* places count from the file's first byte */
    const size_t num_rows = num_rows_of(&e->seek);
    uint64_t place;
    Reader rest = e->codes;
    if (e->interval != e->columns || (uint64_t)num_rows * e->columns != e->left ||
        !place_of_row(&e->seek, 0, &place) || place != before)
        return 0;
    for (size_t row = 1; pass(&rest, num_before(&rest, 0xFF) + 1);) {
        const int code = byte_at(&rest, 0);
        if (!pass(&rest, 1))
            return 0;
        if (code == 0)
            continue;
        if (row == num_rows)
            return code == JPEG_EOI && rest.left == 0;
        if (code != (int)(JPEG_RST0 + (row - 1) % 8) || !place_of_row(&e->seek, row, &place) ||
            place != e->seek.file.left - rest.left)
            return 0;
        row++;
    }
    return 0;
}

/* Goes to the beginning of a row. 0: it is not within the codes. */
static int open_row(Entropy *e)
{
    const uint64_t before = e->seek.file.left - e->codes.left;
    uint64_t from, end = e->seek.file.left;
    if (!place_of_row(&e->seek, e->row, &from) ||
        (e->row + 1 < num_rows_of(&e->seek) && !place_of_row(&e->seek, e->row + 1, &end)) || from < before || end < from ||
        !part_of(&e->codes, from - before, end - from, &e->raw) || !cut(&e->raw, 2) || /* the next marker's bytes */
        !begin_segment(e))
        return 0;
    e->open_row = e->row + 1;
    return e->raw.left == 0;
}

/* As next_mcu, of a seekable file: rows of which nothing is wanted are not read, nor is a row behind what is. */
static int next_seekable_mcu(Entropy *e, JBLOCKROW *blocks)
{
    const JDIMENSION column = e->column;
    if (blocks && column >= e->first_column && column <= e->last_column) {
        if (e->open_row != e->row + 1) {
            if (!open_row(e))
                return 0;
            for (JDIMENSION before = 0; before < column; before++)
                if (!decode_blocks(e, NULL))
                    return 0;
        }
        if (!decode_blocks(e, blocks) || (column + 1 == e->columns && bits_left(e) >= 8))
            return 0;
    }
    e->left--;
    e->column++;
    if (e->column == e->columns) {
        e->column = 0;
        e->row++;
    }
    return 1;
}

/* Begins a scan, of which MCUs of other columns than these are skipped. Tables are built where they are not those of
 * the last image. clean: as many bytes as the scan has, and PADDING. 0: it cannot be. */
static int begin_scan(
    Entropy *e, HuffmanTables *tables, const Scan *scan, Writer clean, JDIMENSION first_column, JDIMENSION last_column)
{
    memset(e, 0, sizeof *e);
    e->codes = e->raw = scan->codes;
    e->clean = clean;
    e->first_column = first_column;
    e->last_column = last_column;
    e->columns = scan->columns;
    e->left = scan->num_mcus;
    e->interval = e->until_restart = scan->interval;
    e->num_blocks = scan->num_blocks;
    e->places = scan->places;
    for (int number = 0; number < e->num_blocks; number++) {
        const ScanBlock *block = &scan->blocks[number];
        e->component[number] = block->component;
        e->dc[number] = &tables->dc[block->dc];
        e->ac[number] = &tables->ac[block->ac];
        if (!block->dc_codes || !block->ac_codes || !build(&tables->dc[block->dc], block->dc_codes, 1, scan->simd) ||
            !build(&tables->ac[block->ac], block->ac_codes, 0, scan->simd))
            return 0;
    }
    e->by_pairs = scan->codes.left > MANY_BYTES;
    for (int number = 0; number < e->num_blocks && e->by_pairs; number++) {
        Table *table = &tables->ac[scan->blocks[number].ac];
        if (!table->has_pairs)
            join_pairs(scan->simd, table);
    }
    e->seek = scan->seek;
    return e->seek.checksum ? begin_seeking(e) : begin_segment(e);
}

/* 0: damage, or something unusual. */
INLINE int next_mcu(Entropy *e, JBLOCKROW *blocks)
{
    if (e->left == 0)
        return 0;
    if (e->seek.checksum)
        return next_seekable_mcu(e, blocks);
    if (e->interval && e->until_restart == 0) {
        if (!is_marker(e, JPEG_RST0 + e->restarts % 8) || !pass(&e->raw, 2) || !begin_segment(e))
            return 0;
        e->restarts++;
        e->until_restart = e->interval;
    }
    const int is_wanted = e->column >= e->first_column && e->column <= e->last_column;
    e->until_restart--;
    e->left--;
    e->column = e->column + 1 < e->columns ? e->column + 1 : 0;
    return decode_blocks(e, is_wanted ? blocks : NULL);
}

/* Reads what is left of the scan. 0: it does not end as it should, with the file. The checksum of a seekable file has
 * told that already. */
INLINE int end_scan(Entropy *e)
{
    if (e->seek.checksum)
        return 1;
    while (e->left)
        if (!next_mcu(e, NULL))
            return 0;
    return is_marker(e, JPEG_EOI);
}
#endif
