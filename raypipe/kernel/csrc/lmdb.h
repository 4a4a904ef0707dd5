/* Records of raypipe's own LMDB layout, many in one call: what raypipe/stores/lmdb_pages.py does, where all is sound.
 *
 *     lmdb_open(file, num_bytes, page_bytes, root, depth, last_page) -> reader
 *     lmdb_read(reader, keys, num_fixed, wanted) -> (fixed, columns, done)
 *
 * `keys` are int64; `fixed` has num_fixed * 8 bytes of each, as they are stored; `wanted` has a byte for each variable
 * column, and `columns` a list for each of those that are not 0, of bytes or None; `done` a byte for each key. Where it
 * is 0, anything was unusual or damaged: the caller reads that key by its own way, which has the last word.
 *
 * One thread reads at a time; of a call beside it nothing is done.
 *
 * All is read by pread, as there: a file that is cut short while it is open costs a sample, and not the process. Bytes
 * are untrusted, and no number of theirs is used before it has been compared with the sizes of what was read.
 */
#ifndef RAYPIPE_LMDB_H
#define RAYPIPE_LMDB_H

#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bounds.h"

#define PAGE_HEADER 16
#define NODE_HEADER 8
#define KEY_BYTES 8
#define MAX_PAGE_BYTES 32768
#define MAX_DEPTH 32
#define MAX_RECORD (1u << 29)   /* MAX_SAMPLE_BYTES of raypipe/stores/base.py */
#define MAX_FIXED (MAX_RECORD / 8)
#define NO_VALUE 0xFFFFFFFFu    /* a length that says None */
#define KEPT_RECORD_BYTES (4u << 20) /* from a call to the next: the largest record of a store may have half a GiB */
enum { BRANCH_PAGE = 1, LEAF_PAGE = 2, OVERFLOW_PAGE = 4, LONG_VALUE = 1 };

/* Branch pages that are kept: two levels of six million keys are 200 of them, see lmdb_pages.py. */
#define NUM_KEPT 1024

typedef struct {
    int file;
    uint64_t num_bytes, page_bytes, root, last_page;
    int depth;
    uint64_t kept_numbers[NUM_KEPT]; /* 0: none, since that is a meta page */
    uint8_t *kept[NUM_KEPT];
    uint8_t *record; /* the one at hand */
    size_t record_bytes;
    PyThread_type_lock lock; /* held by the call that reads */
} LmdbReader;

/* Bytes of the file from the beginning of a page on. */
static int read_at(const LmdbReader *reader, uint64_t number, size_t num, uint8_t *bytes)
{
    const uint64_t start = number * reader->page_bytes;
    if (number < 2 || number > reader->last_page || start > reader->num_bytes || num > reader->num_bytes - start)
        return 0;
    return pread(reader->file, bytes, num, (off_t)start) == (ssize_t)num;
}

/* A page's header, as it begins in all kinds. 0: it is not a page of this number and kind. */
static int pass_header(Reader *page, uint64_t number, unsigned kind)
{
    uint64_t own_number, pad, flags;
    return take_little(page, 8, &own_number) && take_little(page, 2, &pad) && take_little(page, 2, &flags) &&
           own_number == number && flags == kind;
}

/* The page's number of nodes; 0: it is not a sound page of this kind. */
static int num_nodes_of(Reader page, uint64_t number, unsigned kind)
{
    const size_t page_bytes = page.left;
    uint64_t lower, upper;
    if (!pass_header(&page, number, kind) || !take_little(&page, 2, &lower) || !take_little(&page, 2, &upper) ||
        lower < PAGE_HEADER + 2 || lower > upper || upper > page_bytes)
        return 0;
    return (int)(lower - PAGE_HEADER) / 2;
}

/* A node of a page: 4 bytes and the flags, which are its value's size or its child's number; its key, which may be of
 * any length; and what stands behind that, up to the end of the page. */
typedef struct {
    uint64_t low, flags;
    Reader key, behind;
} Node;

/* 0: it is not within its page. */
static int read_node(Reader page, int slot, Node *node)
{
    Reader place, rest;
    uint64_t start, key_bytes;
    if (!part_of(&page, PAGE_HEADER + 2 * (uint64_t)slot, 2, &place) || !take_little(&place, 2, &start) || !start)
        return 0;
    rest = page;
    if (!pass(&rest, start) || !take_little(&rest, 4, &node->low) || !take_little(&rest, 2, &node->flags) ||
        !take_little(&rest, 2, &key_bytes) || !take(&rest, key_bytes, &node->key))
        return 0;
    node->behind = rest;
    return 1;
}

/* As bytes compare: a key that is the other's beginning comes first. */
static int compare(Reader one, Reader other)
{
    const size_t num = one.left < other.left ? one.left : other.left;
    const int order = num ? memcmp(one.at, other.at, num) : 0;
    return order ? order : (one.left > other.left) - (one.left < other.left);
}

/* A branch page, kept or read. 0: it is not sound, or its keys do not ascend. */
static int branch_page(LmdbReader *reader, uint64_t number, Reader *page)
{
    const size_t place = number % NUM_KEPT;
    if (!reader->kept[place] && !(reader->kept[place] = malloc(reader->page_bytes)))
        return 0;
    *page = reader_of(reader->kept[place], reader->page_bytes);
    if (number && reader->kept_numbers[place] == number)
        return 1;
    reader->kept_numbers[place] = 0;
    if (!read_at(reader, number, reader->page_bytes, reader->kept[place]))
        return 0;
    const int num = num_nodes_of(*page, number, BRANCH_PAGE);
    Node before, node;
    for (int slot = 0; slot < num; slot++) {
        if (!read_node(*page, slot, &node) || (slot > 1 && compare(before.key, node.key) >= 0))
            return 0; /* the first key says nothing */
        before = node;
    }
    if (!num)
        return 0;
    reader->kept_numbers[place] = number;
    return 1;
}

/* A value that has pages of its own, read into reader->record. 0: it is not sound. */
static int long_value(LmdbReader *reader, uint64_t number, uint64_t num, Reader *value)
{
    if (num > MAX_RECORD)
        return 0;
    const size_t num_bytes = PAGE_HEADER + (size_t)num;
    if (reader->record_bytes < num_bytes) {
        free(reader->record);
        reader->record_bytes = num_bytes + num_bytes / 4;
        if (!(reader->record = malloc(reader->record_bytes))) {
            reader->record_bytes = 0;
            return 0;
        }
    }
    if (!read_at(reader, number, num_bytes, reader->record))
        return 0;
    *value = reader_of(reader->record, num_bytes);
    uint64_t num_pages;
    return pass_header(value, number, OVERFLOW_PAGE) && take_little(value, 4, &num_pages) &&
           num_pages * reader->page_bytes >= num_bytes && num_pages <= reader->last_page + 1 - number;
}

/* The leaf page that has a key, if any has, read into `leaf`. 0: a page on the way is not sound. */
static int find_leaf(LmdbReader *reader, Reader key, uint8_t *leaf, uint64_t *number)
{
    *number = reader->root;
    for (int level = 1; level < reader->depth; level++) {
        Reader page;
        Node node;
        if (!branch_page(reader, *number, &page))
            return 0;
        int low = 1, high = num_nodes_of(page, *number, BRANCH_PAGE); /* the first whose key is above */
        while (low < high) {
            const int middle = (low + high) / 2;
            if (!read_node(page, middle, &node))
                return 0;
            if (compare(node.key, key) > 0)
                high = middle;
            else
                low = middle + 1;
        }
        if (!read_node(page, low - 1, &node))
            return 0;
        *number = node.low | node.flags << 32;
    }
    return read_at(reader, *number, reader->page_bytes, leaf);
}

/* Finds a key's record. It lies in `leaf`, or is read into reader->record. 0: there is none to be had here. */
static int find_record(LmdbReader *reader, uint64_t index, uint8_t *leaf, Reader *record)
{
    uint8_t key_bytes[KEY_BYTES];
    const Reader key = reader_of(key_bytes, sizeof key_bytes), page = reader_of(leaf, reader->page_bytes);
    Writer to = writer_of(key_bytes, sizeof key_bytes);
    uint64_t number, first_page;
    if (!put_big(&to, KEY_BYTES, index) || !find_leaf(reader, key, leaf, &number))
        return 0;
    Node node;
    const int num_nodes = num_nodes_of(page, number, LEAF_PAGE);
    int low = 0, high = num_nodes; /* the first whose key is not below: in damaged order too, as Python's bisect_left */
    while (low < high) {
        const int middle = (low + high) / 2;
        if (!read_node(page, middle, &node))
            return 0;
        if (compare(node.key, key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == num_nodes || !read_node(page, low, &node) || compare(node.key, key) != 0)
        return 0;
    if (node.flags == 0)
        return take(&node.behind, node.low, record);
    return node.flags == LONG_VALUE && take_little(&node.behind, 8, &first_page) &&
           long_value(reader, first_page, node.low, record);
}

static void close_reader(PyObject *capsule)
{
    LmdbReader *reader = PyCapsule_GetPointer(capsule, "raypipe.lmdb");
    if (!reader)
        return;
    for (int i = 0; i < NUM_KEPT; i++)
        free(reader->kept[i]);
    free(reader->record);
    PyThread_free_lock(reader->lock);
    free(reader);
}

static PyObject *py_lmdb_open(PyObject *self, PyObject *args)
{
    (void)self;
    int file, depth;
    unsigned long long num_bytes, page_bytes, root, last_page;
    if (!PyArg_ParseTuple(args, "iKKKiK", &file, &num_bytes, &page_bytes, &root, &depth, &last_page))
        return NULL;
    if (page_bytes < 512 || page_bytes > MAX_PAGE_BYTES || depth < 1 || depth > MAX_DEPTH ||
        last_page > UINT64_MAX / MAX_PAGE_BYTES - MAX_RECORD || num_bytes > INT64_MAX)
        return PyErr_Format(PyExc_ValueError, "not a tree of LMDB that is read here");
    LmdbReader *reader = calloc(1, sizeof *reader);
    if (!reader)
        return PyErr_NoMemory();
    *reader = (LmdbReader){file, num_bytes, page_bytes, root, last_page, depth, {0}, {0}, NULL, 0, NULL};
    if (!(reader->lock = PyThread_allocate_lock())) {
        free(reader);
        return PyErr_NoMemory();
    }
    PyObject *capsule = PyCapsule_New(reader, "raypipe.lmdb", close_reader);
    if (!capsule) {
        PyThread_free_lock(reader->lock);
        free(reader);
    }
    return capsule;
}

/* Puts the wanted columns of a record into row `row`; 0: it is damaged, -1: a Python error. */
static int unpack_record(Reader record, Reader wanted, Writer *fixed, PyObject *columns, Py_ssize_t row)
{
    Reader numbers;
    if (!take(&record, fixed->left, &numbers) || !put(fixed, numbers))
        return 0;
    const Py_ssize_t num_columns = PyList_Size(columns);
    for (Py_ssize_t column = 0; column < num_columns; pass(&wanted, 1)) {
        uint64_t length;
        Reader content = {0};
        if (!take_little(&record, 4, &length) || (length != NO_VALUE && !take(&record, length, &content)))
            return 0;
        if (!byte_at(&wanted, 0))
            continue;
        PyObject *value = length == NO_VALUE
                              ? Py_NewRef(Py_None)
                              : PyBytes_FromStringAndSize((const char *)content.at, (Py_ssize_t)content.left);
        if (!value || PyList_SetItem(PyList_GetItem(columns, column), row, value) < 0)
            return -1;
        column++;
    }
    return 1;
}

/* A list of None for each column that is wanted; NULL: a Python error. */
static PyObject *new_columns(Reader wanted, Py_ssize_t num)
{
    PyObject *columns = PyList_New(0);
    for (; columns && wanted.left; pass(&wanted, 1)) {
        if (!byte_at(&wanted, 0))
            continue;
        PyObject *column = PyList_New(num);
        for (Py_ssize_t row = 0; column && row < num; row++)
            PyList_SetItem(column, row, Py_NewRef(Py_None));
        if (!column || PyList_Append(columns, column) < 0)
            Py_CLEAR(columns);
        Py_XDECREF(column);
    }
    return columns;
}

static PyObject *zeros(Py_ssize_t num)
{
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, num);
    Writer to = writer_of(bytes ? PyBytes_AsString(bytes) : NULL, bytes ? (size_t)num : 0);
    put_zeros(&to, to.left);
    return bytes;
}

static PyObject *py_lmdb_read(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *capsule;
    Py_buffer keys, wanted;
    int num_fixed;
    if (!PyArg_ParseTuple(args, "Oy*iy*", &capsule, &keys, &num_fixed, &wanted))
        return NULL;
    const Py_ssize_t num = keys.len / 8;
    const Reader columns_wanted = reader_of(wanted.buf, (size_t)wanted.len);
    Reader rest = reader_of(keys.buf, (size_t)keys.len);
    LmdbReader *reader = PyCapsule_GetPointer(capsule, "raypipe.lmdb");
    PyObject *fixed = NULL, *columns = NULL, *done = NULL, *result = NULL;
    uint8_t *leaf = NULL;
    int is_ours = 0;
    if (!reader)
        goto end;
    if (num_fixed < 0 || num_fixed > (int)MAX_FIXED || (num_fixed && num > PY_SSIZE_T_MAX / 8 / num_fixed)) {
        PyErr_SetString(PyExc_ValueError, "no such layout of records");
        goto end;
    }
    fixed = zeros(num * num_fixed * 8);
    done = zeros(num);
    columns = fixed && done ? new_columns(columns_wanted, num) : NULL;
    if (!columns)
        goto end;
    leaf = malloc(reader->page_bytes);
    if (!leaf) {
        PyErr_NoMemory();
        goto end;
    }
    Writer all_fixed = writer_of(PyBytes_AsString(fixed), (size_t)(num * num_fixed * 8)), row_fixed;
    Writer all_done = writer_of(PyBytes_AsString(done), (size_t)num);
    /* Not waited for: in a forked child, the thread that held it in its parent does not exist. */
    is_ours = PyThread_acquire_lock(reader->lock, NOWAIT_LOCK) == PY_LOCK_ACQUIRED;
    for (Py_ssize_t row = 0; is_ours && row < num; row++) {
        uint64_t index = 0;
        Reader key, record;
        int is_done = take(&rest, 8, &key) && set_aside(&all_fixed, (uint64_t)num_fixed * 8, &row_fixed);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        is_done = is_done && take_little(&key, 8, &index);
#else
        is_done = is_done && take_big(&key, 8, &index);
#endif
        Py_BEGIN_ALLOW_THREADS
        is_done = is_done && index <= INT64_MAX && find_record(reader, index, leaf, &record);
        Py_END_ALLOW_THREADS
        if (is_done)
            is_done = unpack_record(record, columns_wanted, &row_fixed, columns, row);
        if (is_done < 0 || !put_big(&all_done, 1, (uint64_t)is_done))
            goto end;
    }
    result = PyTuple_Pack(3, fixed, columns, done);
end:
    if (is_ours) {
        if (reader->record_bytes > KEPT_RECORD_BYTES) {
            free(reader->record);
            reader->record = NULL;
            reader->record_bytes = 0;
        }
        PyThread_release_lock(reader->lock);
    }
    free(leaf);
    Py_XDECREF(fixed);
    Py_XDECREF(columns);
    Py_XDECREF(done);
    PyBuffer_Release(&wanted);
    PyBuffer_Release(&keys);
    return result;
}
#endif
